"""The Mamba-2 layer: projection, convolution, recurrence, gate, norm, output projection.

Shapes: T tokens (including padding), D model width, G groups and H heads of this rank, d width of
the state, v width of a head.
"""

from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.linear import FP32, gathered_bytes
from moeserve.blocks.mamba2 import Mamba2
from moeserve.blocks.recurrent_layer import RecurrentLayer, decay_factors
from moeserve.ops.inputs import LayerCache, RowContext
from moeserve.ops.linear import can_fuse
from moeserve.ops.native_recurrent_block import RecurrentRule
from moeserve.ops.rules import SWIGLU


class Mamba2Layer(RecurrentLayer):
    """Mamba-2 of this rank's heads.

    Tensor-parallel ranks gather the results of all heads before the output projection.
    """

    def __init__(self, spec: Mamba2, build: Builder, name: str, group: int) -> None:
        super().__init__(build, name, group)
        groups, heads, inner, _ = spec.local(self.tp.size)
        self.spec = spec
        # D -> output gates [H * v], x [H * v], B [G * d], C [G * d], time steps [H]
        self.inputs = build.linear(name + "in")
        self.conv_CK = build.fp32(name + "conv")[:, 0]
        self.conv_bias_C = build.fp32(name + "conv_bias")
        self.decay_H = build.fp32(name + "decay", lambda x: decay_factors(x, spec.decay_tensor))
        self.dt_bias_H = build.fp32(name + "dt_bias")
        self.skip_H1 = build.fp32(name + "skip")[:, None]  # D, factors of x that bypass the state
        # Norms of groups: first without weights (ones of a group's size), then times the weights
        self.norm_I = build.fp32(name + "norm")
        self.ones_i = torch.ones(inner // groups, device=self.ops.device)
        self._fused_call = None  # computes the whole layer, if the kernels have such a call
        out = self.out.part if self.tp.size == 1 else None
        if self.ops.recurrent_block is not None and can_fuse(self.inputs, out):
            rule = RecurrentRule(
                groups, heads, self.conv_CK, self.conv_bias_C, self.decay_H, self.dt_bias_H,
                self.norm_I, self.eps,
                skip_H1=self.skip_H1, time_limit=spec.time_limit,
            )  # fmt: skip
            sizes = (spec.state_dim, spec.head_dim)
            self._fused_call = self.ops.recurrent_block(
                self.inputs, None, out, rule, *sizes, self.ops.dtype
            )

    def __call__(self, x_TD: Tensor, step: Any, cache: LayerCache, context: RowContext) -> Tensor:
        """Return the layer's output [T, D]. Writes the tokens' inputs and states to `cache`."""
        if self._fused_call is not None:
            y = self._fused_call(x_TD, cache, step)
            return y if self.tp.size == 1 else self.project_back(y, context)
        spec = self.spec
        ops = self.ops
        groups, heads, inner, shared = spec.local(self.tp.size)
        gate_TI, xBC_TC, dt_TH = torch.split(
            self.inputs(x_TD, context), [inner, inner + 2 * shared, heads], 1
        )
        xBC_TC = ops.causal_conv(xBC_TC, self.conv_CK, self.conv_bias_C, True, cache[:2], step)
        x_TI, *parts = torch.split(xBC_TC, [inner, shared, shared], 1)
        x_THv = x_TI.reshape(-1, heads, spec.head_dim)
        B_TGd, C_TGd = (part.reshape(-1, groups, spec.state_dim) for part in parts)
        dt_TH1 = ops.softplus(dt_TH.float() + self.dt_bias_H).clamp(*spec.time_limit)[:, :, None]
        log_decay_TH1 = dt_TH1 * self.decay_H[:, None]
        o_THv = ops.recurrence(C_TGd, B_TGd, x_THv * dt_TH1, log_decay_TH1, None, cache[2:], step)
        o_THv = o_THv + self.skip_H1 * x_THv
        gated_TI = ops.act_mul(torch.cat((gate_TI.float(), o_THv.flatten(1)), 1), SWIGLU)
        normed_TI = ops.rms_norm(gated_TI.view(-1, len(self.ones_i)), self.ones_i, self.eps).view(
            gated_TI.shape
        )
        return self.project_back((normed_TI * self.norm_I).to(x_TD.dtype), context)

    @staticmethod
    def workspace(
        spec: Mamba2, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        _, heads, inner, shared = spec.local(tp_size)
        # The product `in`: gates, x, B, C and time steps. Then the rounded result.
        num_bytes = tokens * (3 * inner + 2 * shared + heads) * itemsize
        # In fp32: x (the convolution's inputs and results, scaled by time steps, weighted by skip),
        # the recurrence's results, gates and results concatenated, their product.
        num_bytes += tokens * 8 * inner * FP32
        # In fp32: B and C, as inputs and results of the convolution.
        num_bytes += tokens * 4 * shared * FP32
        # In fp32: time steps and log decays, with temporaries.
        num_bytes += tokens * 6 * heads * FP32
        # Inside of the recurrence.
        states = 4 * heads * spec.state_dim * spec.head_dim * FP32
        return (
            num_bytes
            + states
            + gathered_bytes(tokens, spec.num_heads * spec.head_dim + width, itemsize, tp_size)
        )
