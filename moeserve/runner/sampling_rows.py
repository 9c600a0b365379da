"""Sampling parameters by slot, on the host: NumPy columns, and which kinds of work each request needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.plan import NewRequest
from moeserve.sampling import GREEDY_BELOW, TokenSampling


class Trait:
    """What the sampler must do for a request beyond an argmax over its logits: bits of one byte."""

    RANDOM = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    PENALTY = 16
    RULES = 32
    LOGPROBS = 64
    PROMPT_LOGPROBS = 128

    WORK = RANDOM | PENALTY | RULES  # the logits are changed before a token is chosen
    CUT = MIN_P | TOP_K  # only tokens close to the likeliest one stay


class SamplingRows:
    """One column per parameter, indexed by slot; a row is written when a request takes the slot."""

    def __init__(self, slots: int) -> None:
        def column(dtype: Any) -> Callable[[], NDArray[Any]]:
            return lambda: np.zeros(slots, dtype=dtype)

        floats, counts = column(np.float32), column(np.int64)
        self.traits = np.zeros(slots, dtype=np.uint8)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.temperature, self.log_min_p, self.top_p = floats(), floats(), floats()
        self.repetition, self.frequency, self.presence = floats(), floats(), floats()
        self.top_k, self.num_prompt, self.logprobs, self.prompt_logprobs = counts(), counts(), counts(), counts()

    def add(self, new_requests: NewRequest, vocab_size: int) -> None:
        slot, sampling = new_requests.slot, new_requests.sampling
        self.traits[slot] = _traits(new_requests, vocab_size)
        self.seed[slot] = np.uint64(sampling.seed & (2**64 - 1))
        self.temperature[slot] = sampling.temperature
        self.log_min_p[slot] = np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k if 0 < sampling.top_k < vocab_size else vocab_size
        self.repetition[slot] = sampling.repetition_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.presence[slot] = sampling.presence_penalty
        self.num_prompt[slot] = new_requests.num_prompt
        self.logprobs[slot] = sampling.logprobs or 0
        self.prompt_logprobs[slot] = sampling.prompt_logprobs or 0

    def refuse(self, slot: int) -> None:
        """The request in `slot` will fail: nothing of it may reach a kernel."""
        self.traits[slot] = 0


def _traits(new_requests: NewRequest, vocab_size: int) -> int:
    sampling = new_requests.sampling
    traits = 0
    if sampling.temperature >= GREEDY_BELOW:
        traits |= Trait.RANDOM
        traits |= Trait.MIN_P if sampling.min_p > 0 else 0
        traits |= Trait.TOP_K if 0 < sampling.top_k < vocab_size else 0
        traits |= Trait.TOP_P if sampling.top_p < 1 else 0
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
        traits |= Trait.PENALTY
    if _has_rules(sampling):
        traits |= Trait.RULES
    if sampling.logprobs is not None:
        traits |= Trait.LOGPROBS
    # A request that comes back with part of its answer has had its prompt's logprobs.
    if sampling.prompt_logprobs is not None and len(new_requests.tokens) == new_requests.num_prompt:
        traits |= Trait.PROMPT_LOGPROBS
    return traits


def _has_rules(sampling: TokenSampling) -> bool:
    return bool(sampling.min_tokens or sampling.logit_bias or sampling.allowed_ids is not None or sampling.bad_seqs)
