"""One request's rules on which tokens it may or must not produce: allowed ids, biases, min_tokens, bad sequences.

Few requests have any, so these are applied row by row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.runner.filters import NEG_INF
from moeserve.sampling import TokenSampling


@dataclass(frozen=True, slots=True)
class BadSequences:
    """M sequences of equal length whose last token must not follow the others."""

    starts_ML: Tensor  # int64, all but the last token
    last_M: Tensor  # int64


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of one request as tensors on the device, in the order in which they act."""

    not_allowed: Tensor | None  # bool [V]
    bias_ids: Tensor | None
    bias_values: Tensor | None  # float32
    min_tokens: int
    stop_ids: Tensor  # banned until min_tokens were produced
    bad: tuple[BadSequences, ...]

    @classmethod
    def of(cls, sampling: TokenSampling, width: int, device: torch.device) -> Rules:
        """width: padded vocabulary. Token ids must have been checked (`unknown_token`)."""
        not_allowed = None
        if sampling.allowed_ids is not None:
            not_allowed = torch.ones(width, dtype=torch.bool)
            not_allowed[_ids(sampling.allowed_ids)] = False
            not_allowed = not_allowed.to(device)
        bias = sampling.logit_bias or {}
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for sequence in sampling.bad_seqs:
            if sequence:
                by_length.setdefault(len(sequence), []).append(sequence)
        return cls(
            not_allowed=not_allowed,
            bias_ids=_ids(bias).to(device) if bias else None,
            bias_values=torch.tensor(list(bias.values()), dtype=torch.float32, device=device) if bias else None,
            min_tokens=sampling.min_tokens,
            stop_ids=_ids(sampling.stop_ids).to(device),
            bad=tuple(
                BadSequences(
                    torch.tensor([s[:-1] for s in seqs], dtype=torch.int64, device=device),
                    _ids(s[-1] for s in seqs).to(device),
                )
                for seqs in by_length.values()
            ),
        )

    def apply(self, x_V: Tensor, num_answer: int) -> None:
        """Before the penalties. num_answer: tokens that the request has produced."""
        if self.not_allowed is not None:
            x_V.masked_fill_(self.not_allowed, NEG_INF)
        if self.bias_ids is not None and self.bias_values is not None:
            x_V.index_put_((self.bias_ids,), x_V[self.bias_ids] + self.bias_values)
        if num_answer < self.min_tokens:
            x_V.index_fill_(0, self.stop_ids, NEG_INF)

    def ban_sequences(self, x_V: Tensor, history: Tensor) -> None:
        """After the penalties. history: the request's known tokens; a sequence may have begun in the prompt."""
        for bad in self.bad:
            length = bad.starts_ML.shape[1]
            if length > len(history):
                continue
            tail_L = history[len(history) - length :]
            hit_M = (bad.starts_ML == tail_L).all(dim=1)
            limit_M = torch.where(hit_M, NEG_INF, float("inf"))
            x_V.scatter_reduce_(0, bad.last_M, limit_M, reduce="amin")


def unknown_token(sampling: TokenSampling, vocab_size: int) -> int | None:
    """A token id in `sampling` that the model does not have, or None."""
    ids: list[int] = [*sampling.stop_ids, *(sampling.logit_bias or ()), *(sampling.allowed_ids or ())]
    for sequence in sampling.bad_seqs:
        ids.extend(sequence)
    return next((token for token in ids if not 0 <= token < vocab_size), None)


def _ids(tokens: Iterable[int]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64)
