"""Kimi delta attention of a decoder: project, convolve, normalise queries and keys, recur, gate, project back.

T tokens (padded rows included), D model width, H heads of this rank, d their width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.kda import KimiDelta
from moeserve.blocks.linear import ColumnLinear, gathered_bytes
from moeserve.blocks.recurrent_layer import FP32, PrepareTiles, prepare_tiles, unit_heads, unit_weights
from moeserve.comm.tensor import TensorParallel
from moeserve.ops.elementwise import exp
from moeserve.ops.inputs import LayerCache
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops


@dataclass(eq=False, repr=False)
class KimiDeltaLayer:
    """Kimi delta attention of this rank's heads; their outputs are gathered before `out`.

    inputs: D -> queries, keys, values. narrow: D -> d of decays, d of output gates, H of beta. decays, gates: from the
    narrow d to H * d. decay: fp32 factors [H, 1] of the log decays. unit: fp32 weights of the norms that give queries
    and keys length 1, queries scaled by d ** -0.5.
    """

    spec: KimiDelta
    ops: Ops
    tp: TensorParallel
    prepare: PrepareTiles
    inputs: Linear
    narrow: Linear
    decays: Linear
    gates: Linear
    conv_CK: Tensor
    decay_H1: Tensor
    dt_bias_C: Tensor
    unit: tuple[Tensor, Tensor]
    norm_d: Tensor
    eps: float
    out: ColumnLinear

    def __call__(self, x_TD: Tensor, step: Any, cache: LayerCache, channel: int) -> Tensor:
        """Returns the block's output [T, D]; writes what the tokens leave behind to `cache`."""
        ops, d = self.ops, self.spec.head_dim
        heads = self.spec.num_heads // self.tp.size
        narrow = self.narrow(x_TD)
        y_TC = ops.causal_conv(self.inputs(x_TD), self.conv_CK, None, True, cache[:2], step)
        q_TC, k_TC, v_TC = y_TC.chunk(3, 1)
        q_THd, k_THd = (unit_heads(ops, x, weight) for x, weight in zip((q_TC, k_TC), self.unit, strict=True))
        rates_TC = ops.softplus(self.decays(narrow[:, :d].contiguous()).float() + self.dt_bias_C)
        log_decay_THd = rates_TC.view(-1, heads, d) * self.decay_H1
        beta_TH = ops.sigmoid(narrow[:, 2 * d :].float())
        v_THd = v_TC.reshape(-1, heads, d)
        o_THd = ops.recurrence(q_THd, k_THd, v_THd, log_decay_THd, beta_TH, cache[2:], step)
        normed_TC = ops.rms_norm(o_THd.view(-1, d), self.norm_d, self.eps).view(-1, heads * d)
        gated = ops.sigmoid_mul(normed_TC, self.gates(narrow[:, d : 2 * d].contiguous())).to(x_TD.dtype)
        return self.out(self.tp.gather_columns(gated, channel), channel)


def build_layer(spec: KimiDelta, build: Builder, name: str, group: int) -> KimiDeltaLayer:
    """Returns the Kimi delta attention of the layer whose parameters begin with `name`."""
    heads = spec.num_heads // build.world.tp_size
    first = build.world.tp_rank * heads
    return KimiDeltaLayer(
        spec,
        build.ops,
        build.tp,
        prepare_tiles(build, group),
        build.linear(name + "in"),
        build.linear(name + "narrow"),
        build.linear(name + "decays"),
        build.linear(name + "gates"),
        build.fp32(name + "conv")[:, 0],
        -exp(build.fp32(name + "decay")[0, 0])[first : first + heads],
        build.fp32(name + "dt_bias"),
        unit_weights(spec.head_dim, build.ops.device),
        build.fp32(name + "norm"),
        build.eps,
        build.columns(name + "out", build.width),
    )


def workspace(spec: KimiDelta, width: int, tokens: int, max_len: int, size: int, tp_size: int) -> int:
    """Returns an upper bound of the bytes of one call; see `Mixer.workspace`."""
    part, narrow = spec.size // tp_size, 2 * spec.head_dim + spec.num_heads
    rows = tokens * (part * (6 * size + 15 * FP32) + narrow * (2 * size + 2 * FP32))
    return rows + gathered_bytes(tokens, spec.size + width, size, tp_size)
