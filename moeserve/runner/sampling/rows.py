"""The sampling parameters of the request in each slot: NumPy columns and a byte of traits on the host, and rules.

Rules say which tokens a request may produce: allowed ids, biases, min_tokens, bad sequences. Few requests have any, so
these are applied row by row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.plan import NewRequest
from moeserve.sampling import GREEDY_BELOW, TokenSampling

NEG_INF = float("-inf")


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


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one request as tensors on the device. V vocabulary; ids are int64."""

    not_allowed: Tensor | None  # bool [V]
    bias_ids: Tensor
    bias_values: Tensor  # float32
    min_tokens: int
    stop_ids: Tensor  # banned until min_tokens were produced
    bad: tuple[tuple[Tensor, Tensor], ...]  # for each length 1 + L: [M, L] beginnings, [M] tokens that must not follow

    @classmethod
    def of(cls, sampling: TokenSampling, vocab_size: int, device: torch.device) -> Rules:
        """Builds the rules of a request whose token ids have been checked with `unknown_token`."""
        not_allowed = None
        if sampling.allowed_ids is not None:
            not_allowed = torch.ones(vocab_size, dtype=torch.bool)
            not_allowed[_ids(sampling.allowed_ids)] = False
            not_allowed = not_allowed.to(device)
        bias = sampling.logit_bias or {}
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for sequence in filter(None, sampling.bad_seqs):
            by_length.setdefault(len(sequence), []).append(sequence)
        return cls(
            not_allowed=not_allowed,
            bias_ids=_ids(bias).to(device),
            bias_values=torch.tensor(list(bias.values()), dtype=torch.float32, device=device),
            min_tokens=sampling.min_tokens,
            stop_ids=_ids(sampling.stop_ids).to(device),
            bad=tuple(
                (_ids(s[:-1] for s in same).to(device), _ids(s[-1] for s in same).to(device))
                for same in by_length.values()
            ),
        )

    def apply(self, x_V: Tensor, num_answer: int) -> None:
        """Applies the rules that come before the penalties. num_answer: tokens that the request has produced."""
        if self.not_allowed is not None:
            x_V.masked_fill_(self.not_allowed, NEG_INF)
        if len(self.bias_ids):
            x_V.index_put_((self.bias_ids,), x_V[self.bias_ids] + self.bias_values)
        if num_answer < self.min_tokens:
            x_V.index_fill_(0, self.stop_ids, NEG_INF)

    def ban_sequences(self, x_V: Tensor, history: Tensor) -> None:
        """Applies the bad sequences, after the penalties. history: all known tokens of the request; a bad sequence
        may begin in the prompt."""
        for starts_ML, last_M in self.bad:
            length = starts_ML.shape[1]
            if length <= len(history):
                hit_M = (starts_ML == history[len(history) - length :]).all(dim=1)
                limit_M = torch.where(hit_M, NEG_INF, float("inf"))
                x_V.scatter_reduce_(0, last_M, limit_M, reduce="amin")


def unknown_token(sampling: TokenSampling, vocab_size: int) -> int | None:
    """Returns a token id in `sampling` that the model does not have, or None."""
    ids: list[int] = [*sampling.stop_ids, *(sampling.logit_bias or ()), *(sampling.allowed_ids or ())]
    for sequence in sampling.bad_seqs:
        ids.extend(sequence)
    return next((token for token in ids if not 0 <= token < vocab_size), None)


def _ids(tokens: Iterable[int | tuple[int, ...]]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64)
