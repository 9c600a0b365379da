"""Proposers that are models: a head for multi-token prediction, EAGLE, or a small model.

A drafter reads what the target has computed and keeps K/V of its own, in the blocks of the target's
group with full attention. At position p a head reads the target's hidden state there and the token
at p + 1; any other model reads the token at p. So first it goes over all tokens of a step, and then
over its own guesses, one by one.

Guesses are sampled as the target samples, with the noise of their positions: the better a drafter's
logits, the more often both choose the same token, at any temperature. Nothing else depends on what
is in a drafter's cache. It may write where a later step writes again, to the null block where no
block has been granted, and, by an entry of the table that is out of date, to another request's
block, whose drafts are then worse.
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
    """Return the proposer of a drafter, in one native call if it can be."""
    drafter = facts.drafter
    assert drafter is not None
    head = native_head(
        drafter.model, drafter.caches, drafter.rules, facts.groups, facts.tables, facts.sampler
    )
    return ModelProposer(
        facts.spec.num_drafts,
        drafter,
        facts.groups,
        facts.tables,
        facts.sampler,
        facts.upload,
        head,
    )


class ModelProposer(Proposer):
    """Guesses num_drafts tokens for every row that samples. The host waits for how many drafts were
    right: positions of the next ones follow from that, and noise is made from positions on the
    host."""

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
        self._next_SK = (
            self._drafts_SK.clone()
        )  # of steps that may be launched again with the drafts before
        self._collected: deque[I64] = deque()  # slots of steps whose results came, from any thread
        self._drafter = drafter
        self._groups = groups
        self._tables = tables
        self._sampler = sampler
        self._upload = upload
        self._ubatch = UBatch()
        self._full = next(i for i, group in enumerate(groups) if group.rule == FULL)

    def drafts(self, slots_N: I64, places_N: I64) -> Tensor:
        self.finish()
        self._take_over()
        return self._drafts_SK[self._upload(slots_N, places_N)]

    def start(self, step: Verified) -> bool:
        return self._head is not None and self._head.start(step, self.num_drafts)

    @torch.inference_mode()  # in which the tensors were made
    def finish(self) -> None:
        if self._head is not None:
            slots_S, drafts_SK = self._head.wait()
            if len(slots_S):
                self._next_SK[torch.from_numpy(slots_S)] = torch.from_numpy(drafts_SK)

    def launch(self, step: Verified) -> None:
        shift = int(self._drafter.takes_hidden)
        rows = step.rows
        (where,) = self._upload(self._tables.token_offsets(rows.slots_T, rows.positions_T + shift))
        inputs = step.step
        if inputs.live is not None:  # padded for a graph
            inputs = prepare_inputs(step.plan, rows, self._tables, self._groups, self._upload)
        ids_T = self._tables.arena.index_select(0, where).long()
        inputs = replace(
            inputs, ids_T=ids_T, groups=self._own_groups(inputs.groups[self._full]), cut=None
        )
        hidden_TD = step.hidden_TD[: len(ids_T)]
        if self._drafter.combine is not None:
            assert step.aux_TN is not None
            hidden_TD = self._drafter.combine(step.aux_TN[: len(ids_T)])
        hidden_TD = self._forward(inputs, hidden_TD)
        if not (step.plan.propose and len(step.slots_S)):
            return
        hidden_SD = hidden_TD.index_select(0, step.last_S)
        # Waits for the device. A step with drafts has no other one behind it that could be launched
        # meanwhile.
        known_S = rows.positions_T[step.last_S.cpu().numpy()] + 2  # tokens of each request now
        (slots,) = self._upload(step.slots_S)
        tokens_KS = known_S - 1 + np.arange(self.num_drafts)[:, None]
        rounds = self._rounds(step.slots_S, tokens_KS - shift)
        changed = len(self._sampler.rows.having(Trait.PENALTY | Trait.RULES, step.slots_S))
        (offsets_KS,) = self._upload(
            self._tables.token_offsets(step.slots_S, self._inside(tokens_KS))
        )
        drafts_S = self._tables.arena.index_select(0, offsets_KS[0])
        for i, inputs in enumerate(rounds):
            if i or not shift:
                hidden_SD = self._forward(replace(inputs, ids_T=drafts_S.long()), hidden_SD)
            logits_SV = self._model.logits(hidden_SD)
            drafts_S = self._sampler.draft(logits_SV, step.slots_S, self._inside(known_S + i))
            self._next_SK[:, i].index_copy_(0, slots, drafts_S)
            if (
                changed and i + 1 < self.num_drafts
            ):  # penalties and rules read them in the next round
                self._tables.append(offsets_KS[i + 1], drafts_S)

    def collect(self, slots_S: Sequence[int], tokens_S: Sequence[I32]) -> I32:
        self._collected.append(np.asarray(slots_S, np.int64))
        return np.full(len(slots_S), self.num_drafts, np.int32)

    @torch.inference_mode()  # in which the tensors were made
    def _take_over(self) -> None:
        """Make the guesses current that belong to steps whose results are there."""
        while self._collected:
            (slots,) = self._upload(self._collected.popleft())
            self._drafts_SK.index_copy_(0, slots, self._next_SK.index_select(0, slots))

    @property
    def _model(self) -> DraftModel:
        return self._drafter.model

    def _inside(self, positions_S: I64) -> I64:
        """Keep drafts that no request has room for at the table's last entry, which no known token
        has.
        """
        return np.minimum(positions_S, self._tables.width - 1)

    def _forward(self, inputs: StepInputs, hidden_TD: Tensor) -> Tensor:
        if self._drafter.takes_hidden:
            inputs = replace(inputs, embeds=EmbedPatch(hidden_TD))
        hidden_TD = self._model.forward(inputs, self._drafter.caches, self._ubatch)
        self._ubatch.take_load()  # its experts are no part of the placement
        return hidden_TD

    def _rounds(self, slots_S: I64, positions_KS: I64) -> Iterator[StepInputs]:
        """Yield the inputs of one token for each slot, at the positions of each round; the caller
        sets the tokens.
        """
        count = len(slots_S)
        positions_KS = np.minimum(
            positions_KS, self._tables.width - 2
        )  # the last position of a request
        starts_KS = positions_KS.astype(np.int32)
        offsets_R1 = np.arange(count + 1, dtype=np.int32)
        positions, slots, starts, offsets = self._upload(
            positions_KS, slots_S, starts_KS, offsets_R1
        )
        blocks = self._tables.blocks[self._full]
        longest = int(positions_KS.max()) + 1
        group = group_inputs(self._groups[self._full], blocks, longest, slots, positions[0], None)
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
                sample_N=sample,
                offsets_R1=offsets_R1,
                starts_R=starts_KS[i],
                rows_on_device=(starts_S, offsets),
            )

    def _own_groups(self, full: GroupInputs) -> tuple[GroupInputs, ...]:
        """Return the drafter's groups: the blocks of the group with full attention, each with a
        window of its own.
        """
        return tuple(
            replace(full, window=rule.window, chunk=rule.chunk) for rule in self._drafter.rules
        )
