"""The sampling parameters of the request in each slot: NumPy columns on the host, and 16 bits of
traits.
"""

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.plan import NewRequest
from moeserve.runner.tables import I64
from moeserve.sampling import GREEDY_BELOW


class Trait:
    """The properties of a request that need more than an argmax over its logits, as 16 bits."""

    RANDOM = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    PENALTY = 16
    RULES = 32
    LOGPROBS = 64
    PROMPT_LOGPROBS = 128
    DIGESTS = 256
    GRAMMAR = 512

    CHANGED = PENALTY | RULES | GRAMMAR  # the logits are changed before a token is chosen
    CUT = MIN_P | TOP_K  # only the likeliest tokens are kept; for RANDOM rows only


class SamplingRows:
    """One column per parameter, indexed by slot."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.traits = np.zeros(slots, np.uint16)
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.zeros(slots, np.float32)
        self.log_min_p = np.zeros(slots, np.float32)
        self.top_p = np.zeros(slots, np.float32)
        self.repetition = np.zeros(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.num_prompt = np.zeros(slots, np.int64)
        self.logprobs = np.zeros(slots, np.int64)
        self.prompt_logprobs = np.zeros(slots, np.int64)

    def add(self, request: NewRequest) -> None:
        """Write the row of the request's slot. Without top-k, `top_k` is the vocabulary size."""
        slot = request.slot
        sampling = request.sampling
        vocab_size = self.vocab_size
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
        """Clear the traits of a request that will fail, so that its parameters are not used."""
        self.traits[slot] = 0

    def having(self, traits: int, slots_S: NDArray[np.integer]) -> I64:
        """Return the indices in slots_S of the requests that have any of `traits`."""
        return np.flatnonzero(self.traits[slots_S] & traits)


def row_keys(seeds_S: NDArray[np.uint64], positions_S: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return the noise key of each row: a 64-bit hash of seed and position, as int32 [2, S].

    positions_S: the positions of the tokens to sample.
    """
    with np.errstate(over="ignore"):
        key_S = seeds_S + positions_S.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
            key_S = (key_S ^ (key_S >> np.uint64(shift))) * np.uint64(factor)
        key_S ^= key_S >> np.uint64(31)
    return np.ascontiguousarray(key_S.view(np.int32).reshape(-1, 2).T)


def _traits(request: NewRequest, has_top_k: bool) -> int:
    sampling = request.sampling
    is_random = sampling.temperature >= GREEDY_BELOW
    rules = sampling.min_tokens, sampling.logit_bias, sampling.bad_seqs, sampling.processors
    traits = {
        Trait.RANDOM: is_random,
        Trait.MIN_P: is_random and sampling.min_p > 0,
        Trait.TOP_K: is_random and has_top_k,
        Trait.TOP_P: is_random and sampling.top_p < 1,
        Trait.PENALTY: any(
            (
                sampling.presence_penalty,
                sampling.frequency_penalty,
                sampling.repetition_penalty != 1.0,
            )
        ),
        Trait.RULES: sampling.allowed_ids is not None or any(rules),
        Trait.GRAMMAR: sampling.grammar is not None,
        Trait.LOGPROBS: sampling.logprobs is not None,
        Trait.DIGESTS: sampling.receipt,
        # A request that resumes with part of its answer already has its prompt logprobs.
        Trait.PROMPT_LOGPROBS: sampling.prompt_logprobs is not None
        and len(request.tokens) == request.num_prompt,
    }
    return sum(trait for trait, is_set in traits.items() if is_set)
