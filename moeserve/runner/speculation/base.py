"""The seam of speculation: what may guess a request's next tokens.

A proposer's guesses (drafts) are the input of the next step's row, which computes them all and samples at each; those
that equal what is sampled are kept. So drafts never change a token: a proposer may guess whatever it likes, and all
ranks of an engine must only make the same guesses, as they do from equal tokens.

S rows that sample, k drafts at most, N = S + all drafts sampled positions, T tokens of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeserve.engine.plan import I32, NewRequest, StepPlan
from moeserve.ops.inputs import StepInputs
from moeserve.runner.tables import I64, HostRows, Upload


@dataclass(frozen=True, slots=True)
class Verified:
    """A step whose tokens have been sampled and written to the tables; tensors on the device.

    hidden_TD: after the model's last norm. slots_S: the slots that sampled. accepted_S: int64, sampled tokens of each
    that are kept (1 + the drafts that were right). last_S: int64, of the T tokens the one that gave the last of them.
    taps_TN: the streams of `spec.taps` side by side.
    """

    plan: StepPlan
    rows: HostRows
    step: StepInputs
    hidden_TD: Tensor
    slots_S: I64
    accepted_S: Tensor
    last_S: Tensor
    taps_TN: Tensor | None = None


class Proposer(ABC):
    """Keeps `drafts_SK` int32 [slots, num_drafts] on the device: the guesses that follow each slot's last known token."""

    def __init__(self, slots: int, num_drafts: int, device: torch.device) -> None:
        self.num_drafts = num_drafts
        self.drafts_SK = torch.zeros(slots, num_drafts, dtype=torch.int32, device=device)

    def add(self, request: NewRequest) -> None:
        """Takes a request that begins, or begins again, with the tokens it has."""

    def launch(self, step: Verified) -> None:
        """Guesses on the device, behind the step. Does not wait for the device."""

    @abstractmethod
    def collect(self, slots_S: Sequence[int], tokens_S: Sequence[I32]) -> I32:
        """Returns how many drafts there are now for each slot. tokens_S: its new tokens, on the host."""


class LookupProposer(Proposer):
    """Guesses on the host, from tokens alone."""

    def __init__(self, slots: int, num_drafts: int, device: torch.device, upload: Upload) -> None:
        super().__init__(slots, num_drafts, device)
        self._upload = upload

    @abstractmethod
    def guess(self, slot: int, tokens: I32) -> Sequence[int]:
        """Takes the slot's new tokens and returns at most num_drafts guesses of what follows them."""

    def collect(self, slots_S: Sequence[int], tokens_S: Sequence[I32]) -> I32:
        """See `Proposer`."""
        counts_S = np.zeros(len(slots_S), np.int32)
        drafts_SK = np.zeros((len(slots_S), self.num_drafts), np.int32)
        for i, (slot, tokens) in enumerate(zip(slots_S, tokens_S, strict=True)):
            drafts = self.guess(slot, tokens)
            counts_S[i] = len(drafts)
            drafts_SK[i, : len(drafts)] = drafts
        some = np.flatnonzero(counts_S)
        if len(some):
            index, drafts = self._upload(np.asarray(slots_S, np.int64)[some], drafts_SK[some])
            self.drafts_SK.index_copy_(0, index, drafts)
        return counts_S
