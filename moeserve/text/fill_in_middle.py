"""Prompts for which a model writes the text in a gap, between a prefix and a suffix.

Users' texts are encoded without control tokens: a `<|fim_suffix|>` in a file is text.
`tokenizer.fim` is None if a model does not fill in the middle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from moeserve.errors import InvalidRequest
from moeserve.sampling import SamplingParams
from moeserve.text.fim_tokens import FimTokens
from moeserve.text.tokenizer import Tokenizer

# llama.cpp's texts, for what requests do not tell
_REPO_NAME = "myproject\n"
_FILE_NAME = "filename\n"
_CHUNK_SEPARATOR = "\n\n--- snippet ---\n\n"  # for models without a token before files
_SUFFIX_SHARE = 4  # the suffix has one of so many parts of the room, and the prefix the others


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """A piece of another file, which the model reads before the text with the gap."""

    file_name: str
    text: str


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """A prompt that fits the context."""

    token_ids: list[int]
    truncated: bool  # whether a part of the text or a chunk was left out


def fim_tokens(tokenizer: Tokenizer | None, param: str) -> FimTokens:
    """Return the model's tokens. Raises InvalidRequest that names `param` if it has none."""
    if tokenizer is None:
        raise InvalidRequest(
            f"{param}: this server runs without a tokenizer; send token ids as a prompt in the "
            "model's own form",
            param=param,
            code="unsupported_parameter",
        )
    if tokenizer.fim is None:
        raise InvalidRequest(
            f"{param}: this model's tokenizer has no fill-in-the-middle tokens; serve a model that "
            f"has them, such as Qwen3-Coder, or complete the prompt without {param}",
            param=param,
            code="unsupported_parameter",
        )
    return tokenizer.fim


def fill_in_middle_prompt(
    tokenizer: Tokenizer,
    prefix: str | Sequence[int],
    suffix: str | Sequence[int],
    *,
    special: bool = True,
) -> list[int]:
    """Return the ids of a prompt whose answer belongs between a prefix and a suffix.

    `ending_at_markers` returns the parameters with which the answer ends where it should.

    Args:
        tokenizer: The model's tokenizer.
        prefix: The text before the gap, or its ids.
        suffix: The text after the gap, or its ids.
        special: Add the tokens before every text, such as BOS.

    Raises InvalidRequest if the model has no tokens for this.
    """
    tokens = fim_tokens(tokenizer, "suffix")
    start = tokenizer.leading_ids
    before = tokenizer.encode_plain(prefix) if isinstance(prefix, str) else list(prefix)
    if start and before[: len(start)] == start:  # ids of an encoded text
        before = before[len(start) :]
    after = tokenizer.encode_plain(suffix) if isinstance(suffix, str) else list(suffix)
    prompt = tokens.arrange(before, after)
    return [*start, *prompt] if special else prompt


def ending_at_markers(params: SamplingParams, tokens: FimTokens) -> SamplingParams:
    """Return the parameters of an answer that ends at the model's tokens for gaps and files, too.

    These tokens end an answer only here: a chat about them is text. With `ignore_eos` they cannot
    be chosen, because some models have them as ordinary tokens, which have a text.
    """
    if params.ignore_eos:
        never = dict.fromkeys(tokens.end_ids, -100.0)
        return replace(params, logit_bias=never | (params.logit_bias or {}))
    return replace(params, stop_token_ids=[*params.stop_token_ids, *tokens.end_ids])


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    chunks: Sequence[ContextChunk],
    *,
    max_tokens: int,
) -> InfillPrompt:
    """Return a prompt as llama.cpp's /infill makes it, with at most `max_tokens` tokens.

    What does not fit is left out: first the earliest chunks, then the start of the prefix and the
    end of the suffix. Raises InvalidRequest if the model has no tokens for this.
    """
    tokens = fim_tokens(tokenizer, "input_suffix")
    # A longer text has more than max_tokens tokens, whatever it is.
    max_chars = max_tokens * tokenizer.longest_token
    before = tokenizer.encode_plain(prefix[-max_chars:])
    after = tokenizer.encode_plain(suffix[:max_chars])
    start = tokenizer.leading_ids
    num_before, num_after = _shares(
        len(before), len(after), max_tokens - len(start) - len(tokens.arrange([], []))
    )
    text = tokens.arrange(before[len(before) - num_before :], after[:num_after])
    truncated = len(prefix) > max_chars or len(suffix) > max_chars
    truncated = truncated or num_before < len(before) or num_after < len(after)
    context, num_chunks = _context(
        tokenizer, tokens, chunks, max_tokens=max_tokens - len(start) - len(text)
    )
    return InfillPrompt([*start, *context, *text], truncated or num_chunks < len(chunks))


def _shares(num_before: int, num_after: int, room: int) -> tuple[int, int]:
    """Return how many tokens of the prefix and of the suffix fit. A part that needs less than its
    share leaves the rest to the other.
    """
    room = max(room, 0)
    after = min(num_after, max(room // _SUFFIX_SHARE, room - num_before))
    return min(num_before, room - after), after


def _context(
    tokenizer: Tokenizer, tokens: FimTokens, chunks: Sequence[ContextChunk], *, max_tokens: int
) -> tuple[list[int], int]:
    """Return the ids of the last chunks that fit, and how many they are.

    The form is that of Qwen's repositories. Without chunks, there are none of its tokens.
    """
    head: list[int] = []
    tail: list[int] = []
    if tokens.repo is not None:
        head = [tokens.repo, *tokenizer.encode_plain(_REPO_NAME)]
    if tokens.file is not None:
        tail = [tokens.file, *tokenizer.encode_plain(_FILE_NAME)]
    room = max_tokens - len(head) - len(tail)
    kept: list[list[int]] = []
    for chunk in reversed(chunks):
        if len(chunk.file_name) + len(chunk.text) > room * tokenizer.longest_token:
            break
        encoded = _chunk(tokenizer, tokens, chunk)
        if len(encoded) > room:
            break
        room -= len(encoded)
        kept.append(encoded)
    if not kept:
        return [], 0
    middle = [token_id for encoded in reversed(kept) for token_id in encoded]
    return [*head, *middle, *tail], len(kept)


def _chunk(tokenizer: Tokenizer, tokens: FimTokens, chunk: ContextChunk) -> list[int]:
    if tokens.file is None:
        return tokenizer.encode_plain(_CHUNK_SEPARATOR + chunk.text)
    name = tokenizer.encode_plain(chunk.file_name + "\n")
    return [tokens.file, *name, *tokenizer.encode_plain(chunk.text)]
