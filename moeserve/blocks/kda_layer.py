"""The Kimi delta attention layer: projections, convolution, norms, recurrence, gate, output.

Shapes: T tokens (including padding), D model width, H heads of this rank, d their width.
"""

from typing import Any

from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.kda import KimiDelta
from moeserve.blocks.linear import FP32, gathered_bytes
from moeserve.blocks.recurrent_layer import (
    RecurrentLayer,
    decay_factors,
    unit_heads,
    unit_weights,
)
from moeserve.ops.inputs import LayerCache, RowContext


class KimiDeltaLayer(RecurrentLayer):
    """Kimi delta attention of this rank's heads.

    Tensor-parallel ranks gather the results of all heads before the output projection.
    """

    def __init__(self, spec: KimiDelta, build: Builder, name: str, group: int) -> None:
        super().__init__(build, name, group)
        heads = spec.num_heads // self.tp.size
        first = self.tp.rank * heads
        self.spec = spec
        self.inputs = build.linear(name + "in")  # D -> queries, keys, values
        # D -> bottleneck of decays [d], bottleneck of output gates [d], beta [H]; only beta, if
        # decays and output gates are plain products
        self.narrow = build.linear(name + "narrow")
        self.decays = build.linear(name + "decays")  # d or D -> H * d
        self.gates = build.linear(name + "gates")  # d or D -> H * d
        self.conv_CK = build.fp32(name + "conv")[:, 0]
        # Factors of the log decays
        self.decay_H1 = build.fp32(
            name + "decay",
            lambda x: decay_factors(x.view(-1, 1), spec.decay_tensor)[first : first + heads],
        )
        self.dt_bias_C = build.fp32(name + "dt_bias")
        self.unit = unit_weights(spec.head_dim, self.ops.device)  # weights for `unit_heads`
        self.norm_d = build.fp32(name + "norm")

    def __call__(self, x_TD: Tensor, step: Any, cache: LayerCache, context: RowContext) -> Tensor:
        """Return the layer's output [T, D]. Writes the tokens' inputs and states to `cache`."""
        ops = self.ops
        d = self.spec.head_dim
        heads = self.spec.num_heads // self.tp.size
        narrow = self.narrow(x_TD, context)
        y_TC = ops.causal_conv(
            self.inputs(x_TD, context), self.conv_CK, None, True, cache[:2], step
        )
        q_TC, k_TC, v_TC = y_TC.chunk(3, 1)
        q_THd, k_THd = (
            unit_heads(ops, x, weight) for x, weight in zip((q_TC, k_TC), self.unit, strict=True)
        )
        decay_input = gate_input = x_TD
        if self.spec.low_rank:
            decay_input = narrow[:, :d].contiguous()
            gate_input = narrow[:, d : 2 * d].contiguous()
        log_decay_THd = self._log_decays(self.decays(decay_input, context).float())
        beta_TH = ops.sigmoid(narrow[:, self.spec.bottlenecks :].float())
        v_THd = v_TC.reshape(-1, heads, d)
        o_THd = ops.recurrence(q_THd, k_THd, v_THd, log_decay_THd, beta_TH, cache[2:], step)
        normed_TC = ops.rms_norm(o_THd.view(-1, d), self.norm_d, self.eps).view(-1, heads * d)
        gated = ops.sigmoid_mul(normed_TC, self.gates(gate_input, context)).to(x_TD.dtype)
        return self.project_back(gated, context)

    def _log_decays(self, x_TC: Tensor) -> Tensor:
        """Return the log decays [T, H, d], which are below 0, from their product."""
        d = self.spec.head_dim
        x_TC = x_TC + self.dt_bias_C
        if self.spec.lower_bound is None:
            return self.ops.softplus(x_TC).view(-1, len(self.decay_H1), d) * self.decay_H1
        # The factors of decays are negative here.
        scaled_THd = x_TC.view(-1, len(self.decay_H1), d) * -self.decay_H1
        return self.ops.sigmoid(scaled_THd.flatten(1)).view_as(scaled_THd) * self.spec.lower_bound

    @staticmethod
    def workspace(
        spec: KimiDelta, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        part = spec.size // tp_size
        narrow = spec.bottlenecks + spec.num_heads
        # The products to queries, keys, values, decays and output gates, and the rounded result.
        num_bytes = tokens * part * 6 * itemsize
        # In fp32: queries, keys and values (the convolution's inputs and results, normed), decays,
        # the recurrence's results, their norm and the gated results, with temporaries.
        num_bytes += tokens * part * 15 * FP32
        # The bottlenecks of decays and output gates and the betas: the product and copies of it.
        num_bytes += tokens * narrow * (2 * itemsize + 2 * FP32)
        return num_bytes + gathered_bytes(tokens, spec.size + width, itemsize, tp_size)
