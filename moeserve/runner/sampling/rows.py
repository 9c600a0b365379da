"""The sampling parameters of the request in each slot, on the host: NumPy columns and a byte of traits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.plan import NewRequest
from moeserve.sampling import GREEDY_BELOW


class Trait:
    """The needs of a request beyond an argmax over its logits, as bits of one byte."""

    RANDOM = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    PENALTY = 16
    RULES = 32
    LOGPROBS = 64
    PROMPT_LOGPROBS = 128

    CHANGED = PENALTY | RULES  # the logits are changed before the likeliest token is chosen
    CUT = MIN_P | TOP_K  # only tokens close to the likeliest one stay; RANDOM rows only


class SamplingRows:
    """One column per parameter, indexed by slot; a row is written when a request takes the slot."""

    def __init__(self, slots: int) -> None:
        self.traits = np.zeros(slots, np.uint8)
        self.seed = np.zeros(slots, np.uint64)
        self.temperature, self.log_min_p, self.top_p = np.zeros((3, slots), np.float32)
        self.repetition, self.frequency, self.presence = np.zeros((3, slots), np.float32)
        self.top_k, self.num_prompt, self.logprobs, self.prompt_logprobs = np.zeros((4, slots), np.int64)

    def add(self, request: NewRequest, vocab_size: int) -> None:
        """Writes the row of the request's slot. A top-k that is off becomes the vocabulary's size."""
        slot, sampling = request.slot, request.sampling
        has_top_k = 0 < sampling.top_k < vocab_size
        self.traits[slot] = _traits(request, has_top_k)
        self.seed[slot] = np.uint64(sampling.seed & (2**64 - 1))
        self.temperature[slot] = sampling.temperature
        self.log_min_p[slot] = np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k if has_top_k else vocab_size
        self.repetition[slot] = sampling.repetition_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.presence[slot] = sampling.presence_penalty
        self.num_prompt[slot] = request.num_prompt
        self.logprobs[slot] = sampling.logprobs or 0
        self.prompt_logprobs[slot] = sampling.prompt_logprobs or 0

    def refuse(self, slot: int) -> None:
        """Clears the traits of a request that will fail, so that none of its parameters reach a kernel."""
        self.traits[slot] = 0

    def having(self, traits: int, slots_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions in slots_S of the requests that have any of `traits`."""
        return np.flatnonzero(self.traits[slots_S] & traits)


def _traits(request: NewRequest, has_top_k: bool) -> int:
    sampling = request.sampling
    traits = 0
    if sampling.temperature >= GREEDY_BELOW:
        traits |= Trait.RANDOM
        traits |= Trait.MIN_P if sampling.min_p > 0 else 0
        traits |= Trait.TOP_K if has_top_k else 0
        traits |= Trait.TOP_P if sampling.top_p < 1 else 0
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
        traits |= Trait.PENALTY
    if sampling.min_tokens or sampling.logit_bias or sampling.allowed_ids is not None or sampling.bad_seqs:
        traits |= Trait.RULES
    if sampling.logprobs is not None:
        traits |= Trait.LOGPROBS
    # A request that comes back with part of its answer has had its prompt's logprobs.
    if sampling.prompt_logprobs is not None and len(request.tokens) == request.num_prompt:
        traits |= Trait.PROMPT_LOGPROBS
    return traits
