"""Draft with a model: an MTP head, an EAGLE-3 head, or a small model.

A draft model has its own KV cache, in the blocks of the target's group with full attention. A head
reads the target's hidden state at position p together with the token at p + 1. Any other model
reads the token at p. In each step, the draft model first computes all tokens of the step, and then
its own drafts, one by one.

S: rows that sample. T: tokens of the step. K: drafts of a slot. D: width of the hidden states. V:
vocabulary.

Drafts are sampled like the target's tokens, with the same noise at each position. So a better draft
model agrees with the target more often, at any temperature.

The KV cache of the draft model affects the acceptance rate only. So it does no harm that the draft
model may write

- to entries that a later step writes again,
- to the null block, if no block is allocated yet, and
- through an outdated table entry to the block of another request, whose drafts then become worse.
  The model's own layers have other memory in that block (runner/kv_cache.py).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import FULL
from moeserve.engine.plan import I32
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import EmbedPatch, GroupInputs, Positions, StepInputs
from moeserve.runner.sampling.rows import Trait
from moeserve.runner.sampling.sampler import Sampler
from moeserve.runner.speculation.base import (
    Drafter,
    DraftModel,
    Proposer,
    ProposerFacts,
    Verified,
)
from moeserve.runner.speculation.native_head import NativeHead, native_head
from moeserve.runner.tables import I64, Tables, Upload, group_inputs, prepare_inputs


def make(facts: ProposerFacts) -> "ModelProposer":
    """Return the proposer of a draft model, which uses a native call if possible."""
    drafter = facts.drafter
    assert drafter is not None
    head = native_head(
        drafter.model, drafter.caches, drafter.rules, facts.groups, facts.tables, facts.sampler
    )
    return ModelProposer(
        num_drafts=facts.spec.num_drafts,
        drafter=drafter,
        groups=facts.groups,
        tables=facts.tables,
        sampler=facts.sampler,
        upload=facts.upload,
        head=head,
    )


class ModelProposer(Proposer):
    """Drafts num_drafts tokens for every row that samples.

    The host waits for the number of accepted drafts, because it computes the positions of the next
    drafts and their noise.
    """

    reads_steps = True

    def __init__(
        self,
        num_drafts: int,
        drafter: Drafter,
        groups: Sequence[KVGroup],
        tables: Tables,
        sampler: Sampler,
        upload: Upload,
        head: NativeHead | None = None,
    ) -> None:
        super().__init__(num_drafts)
        self._head = head
        self._drafts_SK = torch.zeros(
            tables.slots, num_drafts, dtype=torch.int32, device=tables.arena.device
        )
        # Drafts of steps without a result, which may still be launched again with the old drafts.
        self._new_drafts_SK = self._drafts_SK.clone()
        # Slots of steps whose results have arrived. Appended to by any thread.
        self._collected_slots: deque[I64] = deque()
        self._drafter = drafter
        self._groups = groups
        self._tables = tables
        self._sampler = sampler
        self._upload = upload
        self._ubatch = UBatch()
        # Index of the group with full attention.
        self._full_group = next(i for i, group in enumerate(groups) if group.rule == FULL)

    def drafts(self, slots_N: I64, indices_N: I64) -> Tensor:
        self.wait_for_thread()
        self._adopt_collected()
        return self._drafts_SK[self._upload(slots_N, indices_N)]

    def try_launch_in_thread(self, step: Verified) -> bool:
        return self._head is not None and self._head.start(step, self.num_drafts)

    @torch.inference_mode()  # as when the tensors were created
    def wait_for_thread(self) -> None:
        if self._head is not None:
            slots_S, drafts_SK = self._head.wait()
            if len(slots_S):
                self._new_drafts_SK[torch.from_numpy(slots_S)] = torch.from_numpy(drafts_SK)

    def launch(self, step: Verified) -> None:
        # A head reads a hidden state together with the next token.
        shift = int(self._drafter.takes_hidden)
        rows = step.rows
        (offsets_T,) = self._upload(
            self._tables.token_offsets(rows.slots_T, rows.positions_T + shift)
        )
        inputs = step.step
        if inputs.live is not None:  # padded for a graph
            inputs = prepare_inputs(step.plan, rows, self._tables, self._groups, self._upload)
        ids_T = self._tables.arena.index_select(0, offsets_T).long()
        inputs = replace(
            inputs,
            ids_T=ids_T,
            groups=self._own_groups(inputs.groups[self._full_group]),
            graph_break=None,
        )
        hidden_TD = step.hidden_TD[: len(ids_T)]
        if self._drafter.combine is not None:
            assert step.aux_TA is not None
            hidden_TD = self._drafter.combine(step.aux_TA[: len(ids_T)])
        hidden_TD = self._forward(inputs, hidden_TD)
        if not (step.plan.propose and len(step.slots_S)):
            return
        hidden_SD = hidden_TD.index_select(0, step.last_S)
        # This waits for the device. That costs nothing, because no step can be planned after a step
        # with drafts before its result is known.
        known_S = rows.positions_T[step.last_S.cpu().numpy()] + 2  # known tokens of each request
        (slots,) = self._upload(step.slots_S)
        tokens_KS = known_S - 1 + np.arange(self.num_drafts)[:, None]
        rounds = self._rounds(step.slots_S, tokens_KS - shift)
        # Requests with penalties or rules, whose next draft depends on the drafts before it.
        num_dependent = len(self._sampler.rows.having(Trait.PENALTY | Trait.RULES, step.slots_S))
        (offsets_KS,) = self._upload(
            self._tables.token_offsets(step.slots_S, self._clipped(tokens_KS))
        )
        # At first, the last known tokens.
        drafts_S = self._tables.arena.index_select(0, offsets_KS[0])
        for i, inputs in enumerate(rounds):
            if i or not shift:
                hidden_SD = self._forward(replace(inputs, ids_T=drafts_S.long()), hidden_SD)
            logits_SV = self._model.logits(hidden_SD)
            drafts_S = self._sampler.draft(logits_SV, step.slots_S, self._clipped(known_S + i))
            self._new_drafts_SK[:, i].index_copy_(0, slots, drafts_S)
            if num_dependent and i + 1 < self.num_drafts:
                # Penalties and rules of the next round read the drafts from the table.
                self._tables.append(offsets_KS[i + 1], drafts_S)

    def collect(self, slots_S: Sequence[int], tokens_S: Sequence[I32]) -> I32:
        self._collected_slots.append(np.asarray(slots_S, np.int64))
        return np.full(len(slots_S), self.num_drafts, np.int32)

    @torch.inference_mode()  # as when the tensors were created
    def _adopt_collected(self) -> None:
        """Make the drafts of steps whose results have arrived the current ones."""
        while self._collected_slots:
            (slots,) = self._upload(self._collected_slots.popleft())
            self._drafts_SK.index_copy_(0, slots, self._new_drafts_SK.index_select(0, slots))

    @property
    def _model(self) -> DraftModel:
        return self._drafter.model

    def _clipped(self, positions_S: I64) -> I64:
        """Clip positions to the last table entry, which is never that of a known token."""
        return np.minimum(positions_S, self._tables.width - 1)

    def _forward(self, inputs: StepInputs, hidden_TD: Tensor) -> Tensor:
        if self._drafter.takes_hidden:
            inputs = replace(inputs, embeds=EmbedPatch(hidden_TD))
        hidden_TD = self._model.forward(inputs, self._drafter.caches, self._ubatch)
        self._ubatch.take_load()  # dropped: the draft model's experts are not in the placement
        return hidden_TD

    def _rounds(self, slots_S: I64, positions_KS: I64) -> Iterator[StepInputs]:
        """Yield the inputs of each round, with one token per slot. The caller sets the tokens."""
        count = len(slots_S)
        last_position = self._tables.width - 2  # the last position of a request of maximum length
        positions_KS = np.minimum(positions_KS, last_position)
        starts_KS = positions_KS.astype(np.int32)
        offsets_R1 = np.arange(count + 1, dtype=np.int32)
        positions, slots, starts, offsets = self._upload(
            positions_KS, slots_S, starts_KS, offsets_R1
        )
        blocks = self._tables.blocks[self._full_group]
        longest = int(positions_KS.max()) + 1
        group = group_inputs(
            self._groups[self._full_group],
            blocks,
            longest=longest,
            slots_R=slots,
            positions_T=positions[0],
            rows_T=None,
        )
        sample = torch.arange(count, device=positions.device)
        for i, (positions_S, starts_S) in enumerate(zip(positions, starts, strict=True)):
            index_S1 = (positions_S // group.block_size).unsqueeze(1)
            block_S = group.blocks_RN.gather(1, index_S1).squeeze(1)
            group = replace(
                group, slot_mapping_T=block_S * group.block_size + positions_S % group.block_size
            )
            yield StepInputs(
                ids_T=positions_S,
                positions=Positions.of_text(positions_S),
                groups=self._own_groups(group),
                logits_indices_N=sample,
                offsets_R1=offsets_R1,
                starts_R=starts_KS[i],
                rows_on_device=(starts_S, offsets),
            )

    def _own_groups(self, full: GroupInputs) -> tuple[GroupInputs, ...]:
        """Return the draft model's KV groups, which use the blocks of the target's group with full
        attention, but have their own windows.
        """
        return tuple(
            replace(full, window=rule.window, chunk=rule.chunk) for rule in self._drafter.rules
        )
