"""The seam of speculation: what may guess a request's next tokens.

A proposer's guesses (drafts) are the input of the next step's row, which computes them all and
samples at each; those that equal what is sampled are kept. So drafts never change a token: a
proposer may guess whatever it likes. All ranks of an engine verify what the first one guesses.

S rows that sample, N tokens that are sampled, or drafts; T tokens of the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.plan import I32, NewRequest, StepPlan
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import LayerCache, StepInputs
from moeserve.runner.sampling.sampler import Sampler
from moeserve.runner.tables import I64, HostRows, Tables, Upload
from moeserve.speculation import SpeculationSpec


@dataclass(frozen=True, slots=True)
class Verified:
    """A step whose tokens have been sampled and written to the tables; tensors on the device.

    hidden_TD: after the model's last norm. slots_S: the slots that sampled. accepted_S: int64,
    sampled tokens of each that are kept (1 + the drafts that were right). last_S: int64, of the T
    tokens the one that gave the last of them. aux_TN: the streams of `spec.aux_hidden_layers` side
    by side.
    """

    plan: StepPlan
    rows: HostRows
    step: StepInputs
    hidden_TD: Tensor
    slots_S: I64
    accepted_S: Tensor
    last_S: Tensor
    aux_TN: Tensor | None = None


class DraftModel(Protocol):
    """What computes drafts; a `Decoder` is one."""

    def forward(self, step: StepInputs, caches: Sequence[LayerCache], ubatch: UBatch) -> Tensor:
        """Return hidden states for `logits`, and for the next token's `step.embeds`.

        `step.embeds` has those of the target, or what this method returned for the token before.
        """

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Return every token's score, fp32 [S, V]."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """A draft model and its caches. rules: of its KV groups. takes_hidden: whether it reads hidden
    states, and with each that of the token before. combine: makes those of the target's streams
    (`Verified.aux_TN`)."""

    model: DraftModel
    caches: Sequence[LayerCache]
    rules: Sequence[KVRule]
    takes_hidden: bool
    combine: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerFacts:
    """What a proposer is made for."""

    spec: SpeculationSpec
    slots: int  # batch slots
    upload: Upload
    groups: Sequence[KVGroup]
    tables: Tables
    sampler: Sampler
    drafter: Drafter | None  # of kinds model, mtp and eagle


class Proposer(ABC):
    """Guesses at most `num_drafts` tokens that follow each slot's last known one."""

    reads_steps = False  # whether `launch` does anything

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    @abstractmethod
    def drafts(self, slots_N: I64, places_N: I64) -> Tensor:
        """Return guesses, int32 [N] on the device: of slots_N[i], the one that is places_N[i]
        behind the first.
        """

    def add(self, request: NewRequest) -> None:  # noqa: B027
        """Take a request that begins, or begins again, with the tokens it has, before the first
        `collect` for it.
        """

    def launch(self, step: Verified) -> None:  # noqa: B027
        """Read a step, whether or not a row samples, and guesses, if its plan asks for that, on
        the device, behind the step. Does not wait for the device."""

    def start(self, step: Verified) -> bool:
        """Does what `launch` does beside the host's work, on a thread that needs no interpreter,
        and returns True; or nothing, and False. Nothing else of the runner's may change until
        `finish`."""
        return False

    def finish(self) -> None:  # noqa: B027
        """Wait for what was started."""

    @abstractmethod
    def collect(self, slots_S: Sequence[int], tokens_S: Sequence[I32]) -> I32:
        """Return how many drafts there are now for each slot. tokens_S: its new tokens, on the
        host.
        """


class LookupProposer(Proposer):
    """Guesses on the host, from tokens alone."""

    def __init__(self, slots: int, num_drafts: int, upload: Upload) -> None:
        super().__init__(num_drafts)
        self._upload = upload
        self._drafts_SK = np.zeros((slots, num_drafts), np.int32)

    def drafts(self, slots_N: I64, places_N: I64) -> Tensor:
        return self._upload(self._drafts_SK[slots_N, places_N])[0]

    @abstractmethod
    def guess(self, slot: int, tokens: I32) -> Sequence[int]:
        """Return at most num_drafts guesses of what follows the slot's new tokens."""

    def collect(self, slots_S: Sequence[int], tokens_S: Sequence[I32]) -> I32:
        counts_S = np.zeros(len(slots_S), np.int32)
        for i, (slot, tokens) in enumerate(zip(slots_S, tokens_S, strict=True)):
            drafts = self.guess(slot, tokens)
            counts_S[i] = len(drafts)
            self._drafts_SK[slot, : len(drafts)] = drafts
        return counts_S


def count_accepted(right_N: Tensor, drafts_S: I32, upload: Upload) -> Tensor:
    """Return how many sampled tokens of each row are kept, int64 [S]: those up to the first that
    its draft was not.

    right_N: bool, whether the draft at the same place equals the sampled token; drafts_S of a row,
    then one without a draft whose value does not matter. right [yes, no, yes, x, x], drafts [3, 0]
    -> [2, 1]
    """
    most = int(drafts_S.max())
    if (drafts_S == most).all():
        return 1 + right_N.view(-1, most + 1)[:, :-1].long().cumprod(dim=1).sum(dim=1)
    lengths_S = drafts_S.astype(np.int64) + 1
    place_SK = np.arange(most)
    is_draft_SK = place_SK < drafts_S[:, None]
    index_SK = (lengths_S.cumsum() - lengths_S)[:, None] + np.where(is_draft_SK, place_SK, 0)
    index, is_draft = upload(index_SK, is_draft_SK)
    return 1 + (right_N[index] & is_draft).long().cumprod(dim=1).sum(dim=1)
