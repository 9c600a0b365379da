"""The task that decodes blocks of tokens from masks (block diffusion, docs/diffusion.md).

In each step, a row that samples ends with a block whose tokens are partly masks. At each mask, the
likeliest token has a confidence, its probability. Every token with a confidence above a threshold
replaces its mask; if there is none, the most confident one does. When a block has no more masks,
its tokens are the row's result. Its keys and values are those of an earlier state then, so the next
step computes the block again, before the next block.

The state of a block is in the token table. It is a function of the request's tokens and of the
number of steps, so a block that begins anew, after a preemption, has the same tokens.

S: rows that sample. B: tokens of a block. N: S * B. V: vocabulary.

Source: SDAR (arXiv 2510.06303), Fast-dLLM (arXiv 2505.22618).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.plan import NewRequest, StepPlan, StepResult
from moeserve.models.decoder import Decoder
from moeserve.models.spec import BlockDiffusion
from moeserve.runner.sampling.logprobs import PROMPT_ELEMENTS
from moeserve.runner.sampling.sampler import Status
from moeserve.runner.tables import I64, HostRows, Tables, Upload
from moeserve.runner.tasks import Arrays, ComputedStep, RowTask, TaskOutputs


class _Undo(NamedTuple):
    """The blocks of a step before it changed them."""

    step: int
    slots_S: I64
    offsets_SB: Tensor
    tokens_SB: Tensor


class BlockTask(RowTask):
    """Replaces masks by tokens in the token table, where the next step reads them."""

    def __init__(
        self,
        model: Decoder,
        diffusion: BlockDiffusion,
        vocab_size: int,
        tables: Tables,
        upload: Upload,
    ) -> None:
        self._model = model
        self._diffusion = diffusion
        self._vocab_size = vocab_size
        self._tables = tables
        self._upload = upload
        # Of the request in each slot, the tokens that were known when it got the slot. They never
        # change, even if they are masks.
        self._num_given = np.zeros(tables.slots, np.int64)
        self._undo: _Undo | None = None

    def add(self, request: NewRequest) -> str | None:
        block = self._diffusion.block
        num_given = len(request.tokens)
        num_masks = block - num_given % block
        masks = np.full(num_masks, self._diffusion.mask_id, np.int32)
        self._tables.extend(request.slot, num_given, masks)
        self._num_given[request.slot] = num_given
        return None

    def refuse(self, slot: int) -> None:
        pass  # `add` stored nothing that matters for a request that ends

    def begin(self, plan: StepPlan, rows: HostRows, drafts: Tensor | None) -> None:
        """Undo what the step has done before, if it is launched again."""
        undo = self._undo
        if undo is None or undo.step != plan.step:
            return
        # The blocks of new requests were written by `add`.
        new_slots = [request.slot for request in plan.new_requests]
        (is_old_S,) = self._upload(~np.isin(undo.slots_S, new_slots))
        self._tables.append(undo.offsets_SB[is_old_S], undo.tokens_SB[is_old_S])

    def rows(self, plan: StepPlan) -> I64:
        return np.flatnonzero(plan.samples_R)

    def run(self, step: ComputedStep) -> "BlockOutputs":
        plan = step.plan
        rows_S = step.rows.sampling_rows_S
        slots_S = plan.slots_R[rows_S].astype(np.int64)
        block = self._diffusion.block
        within_B = np.arange(block)
        ends_S = (plan.starts_R + plan.counts_R)[rows_S].astype(np.int64)
        positions_SB = ends_S[:, None] - block + within_B
        last_S = step.rows.offsets_R1[rows_S + 1].astype(np.int64)
        num_given_SB = self._num_given[slots_S][:, None]
        is_given_SB, tokens_at_N, offsets_SB = self._upload(
            positions_SB < num_given_SB,
            (last_S[:, None] - block + within_B).ravel(),
            self._tables.token_offsets(slots_S[:, None], positions_SB),
        )
        before_SB = self._tables.arena[offsets_SB]
        is_masked_SB = (before_SB == self._diffusion.mask_id) & ~is_given_SB
        best_N, confidence_N = self._likeliest(step.hidden_TD.index_select(0, tokens_at_N))
        confidence_SB = confidence_N.view_as(before_SB)
        is_new_SB = accepted(confidence_SB, is_masked_SB, self._diffusion.threshold)
        tokens_SB = torch.where(is_new_SB, best_N.view_as(before_SB), before_SB)
        self._undo = _Undo(plan.step, slots_S, offsets_SB, before_SB)
        self._tables.append(offsets_SB, tokens_SB)
        self._append_masks(slots_S, ends_S)
        return BlockOutputs(
            slots_S=slots_S,
            is_given_SB=positions_SB < num_given_SB,
            tokens_SB=tokens_SB,
            is_done_S=~(is_masked_SB & ~is_new_SB).any(1),
            is_finite_S=confidence_SB.isfinite().all(1),
        )

    def _likeliest(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest token, int32, and its probability. The mask is never chosen.

        Chunks of whole blocks bound the memory.
        """
        mask_id = self._diffusion.mask_id
        block = self._diffusion.block
        tokens = []
        probabilities = []
        num_blocks = max(1, PROMPT_ELEMENTS // (self._vocab_size * block))
        for part_ND in torch.split(hidden_ND, num_blocks * block):
            logits_NV = self._model.logits(part_ND)
            probs_NV = torch.softmax(logits_NV, dim=-1)
            logits_NV[:, mask_id] = -torch.inf
            tokens_N = logits_NV.argmax(dim=-1)
            tokens.append(tokens_N.int())
            probabilities.append(probs_NV.gather(1, tokens_N[:, None])[:, 0])
        return torch.cat(tokens), torch.cat(probabilities)

    def _append_masks(self, slots_S: I64, ends_S: I64) -> None:
        """Write the masks of the next block of each row, which is computed once this one is done.

        The last block of the context has no next one.
        """
        block = self._diffusion.block
        has_next_S = ends_S + block < self._tables.width
        positions_SB = ends_S[has_next_S, None] + np.arange(block)
        offsets_N = self._tables.token_offsets(slots_S[has_next_S, None], positions_SB).ravel()
        masks_N = np.full(len(offsets_N), self._diffusion.mask_id, np.int32)
        self._tables.append(*self._upload(offsets_N, masks_N))


def accepted(confidence_SB: Tensor, is_masked_SB: Tensor, threshold: float) -> Tensor:
    """Return which masks are replaced: those above the threshold, or else the most confident one.

    confidence [0.2, 0.6, 0.9], is_masked [1, 1, 0], threshold 0.7 -> [0, 1, 0]
    """
    confidence_SB = confidence_SB.masked_fill(~is_masked_SB, -1.0)
    is_sure_SB = confidence_SB > threshold
    is_best_SB = torch.zeros_like(is_masked_SB)
    is_best_SB.scatter_(1, confidence_SB.argmax(1, keepdim=True), value=True)
    chosen_SB = torch.where(is_sure_SB.any(1, keepdim=True), is_sure_SB, is_best_SB)
    return chosen_SB & is_masked_SB


@dataclass(slots=True)
class BlockOutputs(TaskOutputs):
    """The blocks of a step on the device, and facts about its rows on the host."""

    slots_S: I64
    is_given_SB: NDArray[np.bool_]
    tokens_SB: Tensor  # int32
    is_done_S: Tensor  # whether the block has no more masks
    is_finite_S: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"tokens": self.tokens_SB, "done": self.is_done_S, "finite": self.is_finite_S}

    def add_to(self, result: StepResult, fetched: Arrays) -> StepResult:
        is_finite_S = fetched["finite"]
        message = Status.MESSAGES[Status.NOT_FINITE]
        failed = dict.fromkeys(self.slots_S[~is_finite_S].tolist(), message) | result.failed
        is_result_SB = ~self.is_given_SB & (fetched["done"] & is_finite_S)[:, None]
        return replace(
            result,
            tokens_N=fetched["tokens"][is_result_SB],
            counts_S=is_result_SB.sum(1).astype(np.int32),
            failed=failed,
        )
