"""The gated delta net layer: projection, convolution, norms, recurrence, gate, output projection.

Shapes: T tokens (including padding), D model width, G heads of queries and keys and H heads of
values of this rank, d and v their widths.
"""

from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.gated_delta import GatedDelta
from moeserve.blocks.linear import FP32, gathered_bytes
from moeserve.blocks.recurrent_layer import (
    UNIT_EPS,
    RecurrentLayer,
    decay_factors,
    unit_heads,
    unit_weights,
)
from moeserve.ops.inputs import LayerCache, RowContext
from moeserve.ops.linear import can_fuse
from moeserve.ops.native_recurrent_block import RecurrentRule
from moeserve.ops.rules import SWIGLU


class GatedDeltaLayer(RecurrentLayer):
    """The gated delta net of this rank's heads.

    Tensor-parallel ranks gather the results of all heads before the output projection.
    """

    def __init__(self, spec: GatedDelta, build: Builder, name: str, group: int) -> None:
        keys, values, _, _ = spec.local(build.world.tp_size)
        values_per_key = values // keys
        if spec.inputs_by_head:
            d = spec.k_dim
            build.reorder(
                name + "in",
                by_part([d, d, values_per_key * spec.v_dim, values_per_key * spec.v_dim], keys),
            )
        if spec.gates_by_head:
            build.reorder(name + "gates", by_part([values_per_key, values_per_key], keys))
        super().__init__(build, name, group)
        self.spec = spec
        self.inputs = build.linear(name + "in")  # D -> queries, keys, values, output gates
        self.gates = build.linear(name + "gates")  # D -> 2 H: beta, decays
        self.conv_CK = build.fp32(name + "conv")[:, 0]
        self.decay_H = build.fp32(name + "decay", lambda x: decay_factors(x, spec.decay_tensor))
        self.dt_bias_H = build.fp32(name + "dt_bias")
        self.unit = unit_weights(spec.k_dim, self.ops.device)  # weights for `unit_heads`
        self.norm_v = build.fp32(name + "norm")
        places = torch.tensor(spec.places, device=self.ops.device)
        if spec.tiled:
            columns = torch.arange(len(places) * spec.v_dim, device=self.ops.device)
            self.out_order = columns.view(-1, spec.v_dim)[places.argsort()].flatten()
        self._fused_call = None  # computes the whole layer, if the kernels have such a call
        out = self.out.part if self.tp.size == 1 else None
        if (
            self.ops.recurrent_block is not None
            and spec.output_gate == "silu"
            and can_fuse(self.inputs, self.gates, out)
        ):
            rule = RecurrentRule(
                keys, values, self.conv_CK, None, self.decay_H, self.dt_bias_H, self.norm_v,
                self.eps,
                unit=(*self.unit, UNIT_EPS / spec.k_dim),
                places=places if spec.tiled and out is not None else None,
            )  # fmt: skip
            sizes = (spec.k_dim, spec.v_dim)
            self._fused_call = self.ops.recurrent_block(
                self.inputs, self.gates, out, rule, *sizes, self.ops.dtype
            )

    def __call__(self, x_TD: Tensor, step: Any, cache: LayerCache, context: RowContext) -> Tensor:
        """Return the layer's output [T, D]. Writes the tokens' inputs and states to `cache`."""
        if self._fused_call is not None:
            y = self._fused_call(x_TD, cache, step)
            return y if self.tp.size == 1 else self.project_back(y, context)
        spec = self.spec
        ops = self.ops
        _, values, qk, v = spec.local(self.tp.size)
        projected = self.inputs(x_TD, context)
        gates = self.gates(x_TD, context).float()
        y_TC = ops.causal_conv(projected[:, : qk + v], self.conv_CK, None, True, cache[:2], step)
        q_TGd, k_TGd = (
            unit_heads(ops, x, weight)
            for x, weight in zip(y_TC[:, :qk].chunk(2, 1), self.unit, strict=True)
        )
        v_THv = y_TC[:, qk:].reshape(-1, values, spec.v_dim)
        beta_TH = ops.sigmoid(gates[:, :values])
        log_decay_TH1 = (self.decay_H * ops.softplus(gates[:, values:] + self.dt_bias_H))[
            :, :, None
        ]
        o_THv = ops.recurrence(q_TGd, k_TGd, v_THv, log_decay_TH1, beta_TH, cache[2:], step)
        normed = ops.rms_norm(o_THv.view(-1, spec.v_dim), self.norm_v, self.eps).view(-1, v)
        output_gates = projected[:, qk + v :].float()
        if spec.output_gate == "sigmoid":
            gated = ops.sigmoid_mul(normed, output_gates)
        else:
            gated = ops.act_mul(torch.cat((output_gates, normed), 1), SWIGLU)
        return self.project_back(gated.to(x_TD.dtype), context)

    @staticmethod
    def workspace(
        spec: GatedDelta, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        _, values, qk, v = spec.local(tp_size)
        # The product `in`: queries, keys, values and output gates.
        num_bytes = tokens * (qk + 2 * v) * itemsize
        # The convolution's inputs and results, and normed queries and keys with values, in fp32.
        num_bytes += tokens * 3 * (qk + v) * FP32
        # The recurrence's results, their norm, gates and normed results together, their product.
        num_bytes += tokens * 5 * v * FP32
        # Beta and log decays, with temporaries.
        num_bytes += tokens * 8 * values * FP32
        # The rounded product, and the same in another order.
        num_bytes += tokens * v * itemsize * (2 if spec.tiled else 1)
        return num_bytes + gathered_bytes(
            tokens, spec.num_v_heads * spec.v_dim + width, itemsize, tp_size
        )


def by_part(sizes: list[int], heads: int) -> list[int]:
    """Return the order of rows that regroups rows sorted by head into rows sorted by part.

    sizes: rows of each part of a head. For example sizes [1, 2], 2 heads -> [0, 3, 1, 2, 4, 5].
    """
    per_head = sum(sizes)
    order = list[int]()
    start = 0
    for size in sizes:
        order += [head * per_head + start + i for head in range(heads) for i in range(size)]
        start += size
    return order
