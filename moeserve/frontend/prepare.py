"""From what the user asked (`SamplingParams`) to what the engine obeys (`TokenSampling`), checked before it runs."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence

import msgspec

from moeserve.errors import ContextLengthExceeded, InvalidRequest
from moeserve.frontend.generation import Sequence as OneOf
from moeserve.messages import Ready, Submit
from moeserve.sampling import SamplingParams, TokenSampling
from moeserve.text.tokenizer import Tokenizer

LONG_TEXT = 4_000  # characters
_SEED_MASK = 2**63 - 1


async def token_ids(tokenizer: Tokenizer | None, texts: list[str], *, special: bool) -> list[list[int]]:
    """Token ids of each text, worked out in a thread when they are long together."""
    if tokenizer is None:
        raise InvalidRequest("this server runs without a tokenizer: send token ids", param="prompt")

    def work() -> list[list[int]]:
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
    if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise InvalidRequest("priority must be an integer of 32 bits; lower ones go first", param="priority")


def token_sampling(
    params: SamplingParams,
    prompt_len: int,
    ready: Ready,
    bad_seqs: tuple[tuple[int, ...], ...] = (),
) -> list[TokenSampling]:
    """One `TokenSampling` for each of the n sequences; sequence i samples with seed + i.

    max_tokens is cut to what the context leaves (at least 1: `check_prompt` came first).
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
    return [_with_seed(shared, (seed + i) & _SEED_MASK) for i in range(params.n)]


def submission(sequence: OneOf) -> Submit:
    """Its prompt and whatever was already emitted: the same message starts a sequence and replays it."""
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


def _with_seed(sampling: TokenSampling, seed: int) -> TokenSampling:
    return msgspec.structs.replace(sampling, seed=seed)
