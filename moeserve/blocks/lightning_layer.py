"""The lightning attention layer: qkv, norms and rope or SiLU, recurrence, norm, gate, output.

Shapes: T tokens (including padding), D model width, H heads of this rank, d their width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.lightning import Lightning
from moeserve.blocks.linear import FP32, gathered_bytes
from moeserve.blocks.mixer import Prepare
from moeserve.blocks.recurrent_layer import RecurrentLayer
from moeserve.blocks.rope import half_layout
from moeserve.blocks.rotary import RotaryTable
from moeserve.ops.elementwise import rotary
from moeserve.ops.inputs import LayerCache, Positions, RowContext, StepInputs


@dataclass(frozen=True, slots=True)
class LightningStep:
    """The inputs of one step that layers share."""

    tiles: Any  # the result of `ops.plan_tiles`
    cos_T1d: Tensor  # rotary angles, for `rotary`
    sin_T1d: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PrepareLightning:
    """Makes the `LightningStep` of layers with the same rope."""

    tiles: Prepare
    table: RotaryTable

    def __call__(self, step: StepInputs, positions: Positions) -> LightningStep:
        """Plan the tiles, and look up rotary angles."""
        return LightningStep(self.tiles(step, positions), *self.table.of_heads(positions))


class LightningLayer(RecurrentLayer):
    """Lightning attention of this rank's heads.

    Tensor-parallel ranks gather the results of all heads before the output projection.
    """

    def __init__(self, spec: Lightning, build: Builder, name: str, group: int) -> None:
        super().__init__(build, name, group)
        dim = spec.head_dim
        device = self.ops.device
        heads = spec.num_heads // self.tp.size
        if (order := half_layout(spec.rope, dim)) is not None:
            moved = [head * dim + i for head in range(2 * heads) for i in order]
            build.reorder(name + "qkv", [*moved, *range(len(moved), 3 * heads * dim)])
            for norm in ("q_norm", "k_norm"):
                build.reorder(name + norm, order)
        table = build.rotary_table(spec.rope, dim)
        make_prepare = partial(PrepareLightning, self.prepare, table)
        self.prepare = build.shared(("lightning", group, spec.rope, dim), make_prepare)
        if spec.by_head:
            rows = torch.arange(3 * heads * dim).view(heads, 3, dim).transpose(0, 1)
            build.reorder(name + "qkv", rows.flatten().tolist())
        self.qkv = build.linear(name + "qkv")  # D -> 3 H * d
        self.gate = build.linear(name + "gate")  # D -> H * d
        self.qk_norms = None
        self.scale = 1.0  # factor of queries
        if not spec.silu:
            self.qk_norms = build.norm(name + "q_norm"), build.norm(name + "k_norm")
            self.scale = dim**-0.5
        decays = torch.tensor(spec.log_decays, dtype=torch.float64).float()
        self.log_decay_H1 = decays[self.tp.rank * heads : (self.tp.rank + 1) * heads, None].to(
            device
        )
        self.norm_eps = build.eps if spec.norm_eps is None else spec.norm_eps
        self.shares_group = spec.norm_groups < self.tp.size
        # Norms of groups of heads: first without weights, then times the weights
        self.unit = torch.ones(spec.num_heads * dim // spec.norm_groups, device=device)
        self.norm = build.norm(name + "norm")

    def __call__(
        self, x_TD: Tensor, step: LightningStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the layer's output [T, D]. Writes the tokens' states to `cache`."""
        q_THd, k_THd, v_THd = self._heads(x_TD, step, context)
        log_decay_TH1 = self.log_decay_H1.expand(len(x_TD), -1, -1)
        o_THd = self.ops.recurrence(
            q_THd.mul_(self.scale), k_THd, v_THd, log_decay_TH1, None, cache, step.tiles
        )
        normed_TN = self._normalise(o_THd.flatten(1), context)
        gates_TN = self.gate(x_TD, context)
        gated_TN = self.ops.sigmoid_mul(normed_TN * self.norm, gates_TN).to(x_TD.dtype)
        return self.project_back(gated_TN, context)

    def _heads(
        self, x_TD: Tensor, step: LightningStep, context: RowContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, fp32 [T, H, d] each."""
        shape = (len(x_TD), len(self.log_decay_H1), -1)
        qkv_TN = self.qkv(x_TD, context)
        if self.qk_norms is None:  # SiLU: x * sigmoid(x)
            qkv_TN = self.ops.sigmoid_mul(qkv_TN.float(), qkv_TN)
            q, k, v = (part.reshape(shape) for part in qkv_TN.chunk(3, 1))
            return q, k, v
        q, k, v = (part.reshape(shape) for part in qkv_TN.float().chunk(3, 1))
        q, k = (
            rotary(
                self.ops.rms_norm(part.flatten(0, 1), weight, self.eps).view(shape),
                step.cos_T1d,
                step.sin_T1d,
            )
            for part, weight in zip((q, k), self.qk_norms, strict=True)
        )
        return q, k, v

    def _normalise(self, o_TN: Tensor, context: RowContext) -> Tensor:
        """Return the results of this rank's heads after the norms of groups, without weights.

        If ranks share the heads of one group, they gather all heads, because adding up the ranks'
        sums would round differently.
        """
        tokens, width = o_TN.shape
        all_TN = self.tp.gather_columns(o_TN, context.channel) if self.shares_group else o_TN
        groups = all_TN.view(-1, len(self.unit))
        normed_TN = self.ops.rms_norm(groups, self.unit, self.norm_eps).view(tokens, -1)
        if not self.shares_group:
            return normed_TN
        return normed_TN[:, self.tp.rank * width : (self.tp.rank + 1) * width]

    @staticmethod
    def workspace(
        spec: Lightning, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        heads = spec.num_heads // tp_size
        dim = spec.head_dim
        # The products to queries, keys, values and gates, and the rounded result.
        num_bytes = tokens * heads * dim * 5 * itemsize
        # In fp32: queries, keys and values (converted, normed, rotated), the recurrence's results,
        # their norm and the gated results.
        num_bytes += tokens * heads * dim * 10 * FP32
        # Three copies of the states, inside of the recurrence.
        states = 3 * heads * dim * dim * FP32
        if spec.norm_groups < tp_size:
            # The results of all heads, and their norm.
            all_heads = spec.num_heads * dim
            num_bytes += (
                gathered_bytes(tokens, all_heads, FP32, tp_size) + tokens * all_heads * FP32
            )
        return (
            num_bytes
            + states
            + gathered_bytes(tokens, spec.num_heads * dim + width, itemsize, tp_size)
        )
