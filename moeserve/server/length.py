"""Refuses texts that cannot fit before they are tokenized, which is what costs time."""

from __future__ import annotations

from moeserve.errors import ContextLengthExceeded
from moeserve.text.tokenizer import Tokenizer


def check_chars(num_chars: int, tokenizer: Tokenizer, max_model_len: int, param: str) -> None:
    """Raises ContextLengthExceeded if the text has too many tokens even if all were the longest there is."""
    if num_chars <= 8 * max_model_len:
        return
    if num_chars > tokenizer.longest_token * max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_chars} characters, which cannot fit into {max_model_len} tokens", param=param
        )
