"""Request tables and step inputs on GPUs, by two Triton kernels.

One kernel writes the staged changes to the tables, the other computes all inputs of a step. Each
needs one copy and one launch. The inputs always have the same addresses, as graphs need them.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import I32, StepPlan
from moeserve.kernels.inputs import StepArrays, StepWords, fill_step, pack, write
from moeserve.ops.inputs import GroupInputs, Positions, StepInputs
from moeserve.runner.tables import I64, HostRows, Tables, Upload


def scatter(arena: Tensor, upload: Upload, offsets_N: I64, values_N: I32) -> None:
    """Set arena[offsets] = values with one kernel. A replacement for `tables.scatter`."""
    words, pieces = pack(offsets_N, values_N)
    (on_device,) = upload(words)
    write(arena, on_device, pieces)


class FixedInputs:
    """Buffers for the inputs of steps with up to max_tokens tokens and one row per slot.

    Initially they are the inputs of a step without tokens.
    """

    def __init__(
        self, tables: Tables, groups: Sequence[KVGroup], upload: Upload, max_tokens: int
    ) -> None:
        self._tables = tables
        self._groups = groups
        self._upload = upload
        self._blocks_GSB = tables.arena[tables.slots * tables.width :].view(
            len(groups), tables.slots, -1
        )
        sizes = tables.slots, max(tables.slots, max_tokens), len(groups), self._blocks_GSB.shape[2]
        self._arrays = StepArrays.empty(max_tokens, *sizes, tables.arena.device)
        for array in fields(StepArrays):
            getattr(self._arrays, array.name).zero_()

    def largest(self, tokens: int, rows: int | None) -> StepInputs:
        """Return the buffers of `fill` as inputs of rows with the longest context.

        rows: the number of rows, each with an equal share of the tokens. None: rows with one token
            each.
        """
        padded_rows = self._tables.slots if rows is None else rows
        length = 1 if rows is None else tokens // rows
        starts_R = np.full(
            min(tokens, padded_rows), self._tables.width - 1 - length, dtype=np.int32
        )
        offsets_R1 = np.arange(len(starts_R) + 1, dtype=np.int32) * np.int32(length)
        return self._inputs(tokens, padded_rows, offsets_R1, starts_R, 0)

    def exact(self, plan: StepPlan, host: HostRows) -> StepInputs:
        """Return the inputs of `plan` without padding, for a step that runs without a graph."""
        step = self.fill(plan, host, len(host.positions_T), len(plan.slots_R))
        return replace(step, live=None)

    def fill(self, plan: StepPlan, host: HostRows, tokens: int, rows: int | None) -> StepInputs:
        """Return the inputs of `plan`, padded to `tokens` and `rows` (None: as many as slots)."""
        max_len = int((plan.starts_R + plan.counts_R).max())
        assert max_len < self._tables.width, (max_len, self._tables.width)
        step = StepWords.of(plan.slots_R, plan.starts_R, host.offsets_R1, host.logits_indices_N)
        (words,) = self._upload(step.words)
        padded_rows = self._tables.slots if rows is None else rows
        size = self._groups[0].block_size
        views = self._views(tokens, padded_rows)
        # Blocks after those of the longest row are never read.
        views = replace(views, blocks_GRB=views.blocks_GRB[:, :, : -(-max_len // size)])
        fill_step(self._tables.tokens, self._blocks_GSB, size, step, words, views)
        return self._inputs(tokens, padded_rows, host.offsets_R1, plan.starts_R, step.samples)

    def _views(self, tokens: int, rows: int) -> StepArrays:
        arrays = self._arrays
        return StepArrays(
            ids_T=arrays.ids_T[:tokens],
            positions_T=arrays.positions_T[:tokens],
            slot_mapping_GT=arrays.slot_mapping_GT[:, :tokens],
            blocks_GRB=arrays.blocks_GRB[:, :rows],
            sample_N=arrays.sample_N,
            offsets_R1=arrays.offsets_R1[: rows + 1],
            starts_R=arrays.starts_R[:rows],
        )

    def _inputs(
        self, tokens: int, padded_rows: int, offsets_R1: I32, starts_R: I32, samples: int
    ) -> StepInputs:
        """Return views of the buffers.

        offsets_R1, starts_R: the rows for which attention metadata is computed.
        """
        views = self._views(tokens, padded_rows)
        rows = len(starts_R)
        return StepInputs(
            ids_T=views.ids_T,
            positions=Positions.of_text(views.positions_T),
            groups=tuple(
                GroupInputs(
                    slot_mapping_T=views.slot_mapping_GT[i],
                    blocks_RN=views.blocks_GRB[i, :rows],
                    block_size=group.block_size,
                    window=group.rule.window,
                    chunk=group.rule.chunk,
                )
                for i, group in enumerate(self._groups)
            ),
            logits_indices_N=views.sample_N[:samples],
            offsets_R1=offsets_R1,
            starts_R=starts_R,
            rows_on_device=(views.starts_R[:rows], views.offsets_R1[: rows + 1]),
            live=views.offsets_R1[padded_rows : padded_rows + 1],
        )
