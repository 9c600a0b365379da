"""The interface of speculative decoding: proposers, which draft a request's next tokens.

The next step computes all drafts of a row and samples at each. A draft is accepted if it equals the
token that is sampled in its place. Therefore drafts never change the answer, whatever they are. All
ranks of an engine verify the drafts of its first rank.

S: rows that sample. N: tokens that are sampled, or drafts. T: tokens of the step. D: width of the
hidden states. A: width of the auxiliary hidden states. K: drafts of a slot.
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
    """A step whose tokens have been sampled and written to the tables."""

    plan: StepPlan
    rows: HostRows
    step: StepInputs
    hidden_TD: Tensor  # after the model's last norm, on the device
    slots_S: I64  # the slots that sampled
    accepted_S: Tensor  # int64: sampled tokens that are kept (1 + accepted drafts)
    last_S: Tensor  # int64: the index (of T) of the token after which the last one was sampled
    aux_TA: Tensor | None = None  # hidden states of `spec.aux_hidden_layers`, concatenated


class DraftModel(Protocol):
    """A model that computes drafts, such as a `Decoder`."""

    def forward(self, step: StepInputs, caches: Sequence[LayerCache], ubatch: UBatch) -> Tensor:
        """Return hidden states, for `logits` and for the next token's `step.embeds`.

        `step.embeds` contains hidden states of the target, or the ones that this method returned
        for the token before.
        """

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Return the logits, fp32 [S, V]."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """A draft model and its KV caches."""

    model: DraftModel
    caches: Sequence[LayerCache]
    rules: Sequence[KVRule]  # the rules of its KV groups
    takes_hidden: bool  # whether it reads a token together with the hidden state before it
    # Returns the hidden states to read, from `Verified.aux_TA`. None: reads `hidden_TD`.
    combine: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerFacts:
    """The arguments with which a proposer is created."""

    spec: SpeculationSpec
    slots: int  # number of slots of the batch
    upload: Upload
    groups: Sequence[KVGroup]
    tables: Tables
    sampler: Sampler
    drafter: Drafter | None  # the draft model of kinds model, mtp and eagle


class Proposer(ABC):
    """Drafts at most `num_drafts` tokens after the last known token of each slot."""

    reads_steps = False  # whether `launch` is implemented

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    @abstractmethod
    def drafts(self, slots_N: I64, indices_N: I64) -> Tensor:
        """Return drafts, int32 [N] on the device: draft number indices_N[i] (from 0) of slot
        slots_N[i].
        """

    def add(self, request: NewRequest) -> None:  # noqa: B027
        """Add a request that begins or resumes. Called before its first `collect`."""

    def launch(self, step: Verified) -> None:  # noqa: B027
        """Launch the work that reads a step and, if its plan has `propose`, drafts tokens.

        The work runs on the device after the step. The host does not wait for it. Steps in which no
        row samples have to be read, too.
        """

    def try_launch_in_thread(self, step: Verified) -> bool:
        """Do the same as `launch` in a native thread, in parallel to the host, and return True.

        If that is not possible, do nothing and return False. Otherwise nothing else of the runner
        may change until `wait_for_thread`.
        """
        return False

    def wait_for_thread(self) -> None:  # noqa: B027
        """Wait for the work of `try_launch_in_thread`."""

    @abstractmethod
    def collect(self, slots_S: Sequence[int], tokens_S: Sequence[I32]) -> I32:
        """Return the number of drafts of each slot.

        tokens_S: the new tokens of each slot, on the host.
        """


class LookupProposer(Proposer):
    """A proposer that drafts on the host, from the tokens alone."""

    def __init__(self, slots: int, num_drafts: int, upload: Upload) -> None:
        super().__init__(num_drafts)
        self._upload = upload
        self._drafts_SK = np.zeros((slots, num_drafts), np.int32)

    def drafts(self, slots_N: I64, indices_N: I64) -> Tensor:
        return self._upload(self._drafts_SK[slots_N, indices_N])[0]

    @abstractmethod
    def guess(self, slot: int, tokens: I32) -> Sequence[int]:
        """Return at most num_drafts tokens that may follow the slot's new tokens."""

    def collect(self, slots_S: Sequence[int], tokens_S: Sequence[I32]) -> I32:
        counts_S = np.zeros(len(slots_S), np.int32)
        for i, (slot, tokens) in enumerate(zip(slots_S, tokens_S, strict=True)):
            drafts = self.guess(slot, tokens)
            counts_S[i] = len(drafts)
            self._drafts_SK[slot, : len(drafts)] = drafts
        return counts_S


def count_accepted(is_right_N: Tensor, num_drafts_S: I32, upload: Upload) -> Tensor:
    """Return how many sampled tokens of each row are kept, int64 [S]: the accepted drafts and one
    more.

    is_right_N: bool, whether a draft equals the token that was sampled in its place. Row i has
    num_drafts_S[i] values for its drafts. Then follows one value for its last token, which has no
    draft; that value is ignored.

    right [yes, no, yes, x, x], drafts [3, 0] -> [2, 1]
    """
    max_drafts = int(num_drafts_S.max())
    if (num_drafts_S == max_drafts).all():
        return 1 + is_right_N.view(-1, max_drafts + 1)[:, :-1].long().cumprod(dim=1).sum(dim=1)
    lengths_S = num_drafts_S.astype(np.int64) + 1
    draft_SK = np.arange(max_drafts)
    is_draft_SK = draft_SK < num_drafts_S[:, None]
    index_SK = (lengths_S.cumsum() - lengths_S)[:, None] + np.where(is_draft_SK, draft_SK, 0)
    index, is_draft = upload(index_SK, is_draft_SK)
    return 1 + (is_right_N[index] & is_draft).long().cumprod(dim=1).sum(dim=1)
