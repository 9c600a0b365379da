"""Admits requests, checks their prompts, and makes the engine's `TokenSampling` of the user's `SamplingParams`."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence

import msgspec

from moeserve.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from moeserve.frontend.generation import Sequence as OneOf
from moeserve.messages import Ready, Submit
from moeserve.sampling import SamplingParams, TokenSampling
from moeserve.text.tokenizer import Tokenizer

LONG_TEXT = 4_000  # characters
MAX_RETRY_AFTER_S = 60.0
_SEED_MASK = 2**63 - 1


async def token_ids(tokenizer: Tokenizer | None, texts: list[str], *, special: bool) -> list[list[int]]:
    """Returns the token ids of each text; encodes in a thread if the texts are long together."""
    if tokenizer is None:
        raise InvalidRequest("this server runs without a tokenizer: send token ids", param="prompt")

    def work() -> list[list[int]]:
        """Encodes the texts, in this thread."""
        return [tokenizer.encode(text, special=special) for text in texts]

    return work() if sum(map(len, texts)) < LONG_TEXT else await asyncio.to_thread(work)


def check_prompt(prompt: Sequence[int], ready: Ready) -> None:
    """Raises InvalidRequest for an empty prompt or an unknown token id, ContextLengthExceeded for a long one."""
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= ready.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"token id {bad} is outside the vocabulary of {ready.vocab_size} tokens", param="prompt")
    if len(prompt) >= ready.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens; this model's context holds {ready.max_model_len}, "
            "prompt and answer together, so shorten the prompt",
            param="prompt",
        )


def check_priority(priority: int) -> None:
    """Raises InvalidRequest unless the priority is a 32-bit integer."""
    if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise InvalidRequest("priority must be an integer of 32 bits; lower ones go first", param="priority")


def token_sampling(
    params: SamplingParams,
    prompt_len: int,
    ready: Ready,
    bad_seqs: tuple[tuple[int, ...], ...] = (),
) -> list[TokenSampling]:
    """Returns one `TokenSampling` for each of the n sequences; sequence i samples with seed + i.

    max_tokens is cut to the room that the context leaves (at least 1: `check_prompt` came first). Raises
    InvalidRequest for a parameter out of its range.
    """
    params.check(ready.vocab_size)
    room = ready.max_model_len - prompt_len
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    ends = () if params.ignore_eos else ready.eos_token_ids
    allowed = params.allowed_token_ids
    seed = random.getrandbits(63) if params.seed is None else params.seed
    shared = TokenSampling(
        seed=0,
        max_tokens=max_tokens,
        temperature=0.0 if params.greedy else params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=min(params.min_tokens, max_tokens),
        stop_ids=tuple(dict.fromkeys((*ends, *params.stop_token_ids))),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logit_bias=params.logit_bias,
        allowed_ids=None if allowed is None else tuple(allowed),
        bad_seqs=bad_seqs,
    )
    return [msgspec.structs.replace(shared, seed=(seed + i) & _SEED_MASK) for i in range(params.n)]


def submission(sequence: OneOf) -> Submit:
    """Returns the message that starts a sequence, or replays it with the tokens that were already generated."""
    owner, sampling = sequence.owner, sequence.sampling
    if sequence.tokens and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # already delivered
    return Submit(
        rid=sequence.rid,
        tokens=array("i", [*owner.prompt_token_ids, *sequence.tokens]).tobytes(),
        num_prompt=len(owner.prompt_token_ids),
        sampling=sampling,
        priority=owner.priority,
        salt=owner.salt,
    )


class Admission:
    """Bounds the number of sequences, and estimates when others may come back.

    max_queued: sequences that may wait beyond those that the engine runs at once; None for no limit.
    """

    def __init__(self, max_queued: int | None) -> None:
        self._max_queued = max_queued
        self._seconds_per_end = 0.1  # moving average
        self._last_end_s = 0.0

    def check(self, num_live: int, num_more: int, ready: Ready) -> None:
        """Raises Overloaded unless num_more sequences may come now, InvalidRequest if they never may."""
        if self._max_queued is None:
            return
        capacity = ready.max_num_seqs + self._max_queued
        if num_more > capacity:
            raise InvalidRequest(f"{num_more} sequences in one request; this server takes at most {capacity} at once")
        if (excess := num_live + num_more - capacity) > 0:
            raise Overloaded(
                f"{num_live} sequences run or wait; no more are taken now",
                retry_after_s=min(max(1.0, excess * self._seconds_per_end), MAX_RETRY_AFTER_S),
            )

    def ended(self, now_s: float, num_live: int) -> None:
        """Notes the end of one sequence; num_live are left."""
        if self._last_end_s:
            self._seconds_per_end += 0.05 * (now_s - self._last_end_s - self._seconds_per_end)
        self._last_end_s = now_s if num_live else 0.0  # idle time says nothing about speed
