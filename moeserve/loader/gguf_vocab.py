"""The special tokens of a GGUF file's vocabulary, which has them as ids or knows them by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError

_PREFIX = "tokenizer.ggml."
# Tokens that end an answer, if the vocabulary has them. llama.cpp knows them by their names.
_END_TOKENS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip
_GEMMA_4_MARK = "<|tool_response>"  # of a vocabulary in which </s> is text
_CALLS = {"<|call|>", "<|calls|>"}  # of vocabularies in which <|end|> only ends a part of an answer
# llama.cpp's ids of special tokens that a file with a SentencePiece tokenizer omits
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}


def tokens_of(metadata: Mapping[str, Any]) -> list[str]:
    """Return the tokens by id, [] if the file has none. Tokens without text have a name."""
    tokens = metadata.get(f"{_PREFIX}tokens")
    if not isinstance(tokens, list):  # a list in a file has strings
        return []
    return [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]


def special_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    """Return the id of a special token; None if the file does not name it.

    name: for example "bos". An id that no token has is ignored, as in llama.cpp.
    """
    numbers = [metadata.get(f"{_PREFIX}{name}_token_id")]
    if str(metadata.get(f"{_PREFIX}model")) == "llama":
        numbers.append(_SENTENCEPIECE_IDS.get(name))
    known = (number for number in numbers if type(number) is int and 0 <= number < num_tokens)
    return next(known, None)


def end_tokens(tokens: list[str]) -> frozenset[str]:
    """Return the tokens that end an answer, or a part of it, by their names."""
    names = _END_TOKENS.intersection(tokens)
    return names - {"</s>"} if _GEMMA_4_MARK in names else names


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of tokens that end an answer: those in the metadata, and known names."""
    tokens = tokens_of(metadata)
    names = end_tokens(tokens)
    if _CALLS & names:
        names -= {"<|end|>"}
    ids = [special_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    known = [i for i, token in enumerate(tokens) if token in names]
    return list(dict.fromkeys([*(number for number in ids if number is not None), *known]))


def tokenizer_config(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tokenizer_config.json would have. Raises CheckpointError."""
    config = {}
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise CheckpointError(
            f"{path}: tokenizer.chat_template is {repr(template)[:80]}, not a string; download "
            "the file again, or give a template with --chat-template"
        )
    if template:
        config["chat_template"] = template
    tokens = tokens_of(metadata)
    for key, name in {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}.items():
        number = special_id(metadata, key, len(tokens))
        if number is not None:
            config[f"{name}_token"] = tokens[number]
    return config
