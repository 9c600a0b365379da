"""Rules that restrict the tokens of a request: allowed ids, biases, min_tokens, bad sequences.

Few requests have rules, so they are applied row by row. V: vocabulary. Ids are int64.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.sampling import TokenSampling

NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one request as tensors on the device."""

    not_allowed: Tensor | None  # bool [V]
    bias_ids: Tensor
    bias_values: Tensor  # float32
    min_tokens: int
    stop_ids: Tensor  # not allowed before min_tokens tokens
    # Bad sequences, M of each length 1 + L: beginnings [M, L] and last tokens [M]. After a
    # beginning, its last token is not allowed.
    bad: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, sampling: TokenSampling, vocab_size: int, device: torch.device) -> "Rules":
        """Build the rules of a request. Its token ids must have passed `unknown_token`."""
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
                (
                    _ids(sequence[:-1] for sequence in sequences).to(device),
                    _ids(sequence[-1] for sequence in sequences).to(device),
                )
                for sequences in by_length.values()
            ),
        )

    def apply(self, x_V: Tensor, num_answer: int) -> None:
        """Apply the rules that come before the penalties. num_answer: tokens generated so far."""
        if self.not_allowed is not None:
            x_V.masked_fill_(self.not_allowed, NEG_INF)
        if len(self.bias_ids):
            x_V.index_put_((self.bias_ids,), x_V[self.bias_ids] + self.bias_values)
        if num_answer < self.min_tokens:
            x_V.index_fill_(0, self.stop_ids, NEG_INF)

    def ban_sequences(self, x_V: Tensor, history: Tensor) -> None:
        """Apply the bad sequences, which come after the penalties.

        history: all known tokens of the request, because a bad sequence may begin in the prompt.
        """
        for starts_ML, last_M in self.bad:
            length = starts_ML.shape[1]
            if length <= len(history):
                hit_M = (starts_ML == history[len(history) - length :]).all(dim=1)
                limit_M = torch.where(hit_M, NEG_INF, float("inf"))
                x_V.scatter_reduce_(0, last_M, limit_M, reduce="amin")


def unknown_token(sampling: TokenSampling, vocab_size: int) -> int | None:
    """Return a token id in the parameters that is not in the vocabulary; None: there is none."""
    ids: list[int] = [
        *sampling.stop_ids,
        *(sampling.logit_bias or ()),
        *(sampling.allowed_ids or ()),
    ]
    for sequence in sampling.bad_seqs:
        ids.extend(sequence)
    return next((token for token in ids if not 0 <= token < vocab_size), None)


def _ids(tokens: Iterable[int | tuple[int, ...]]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64)
