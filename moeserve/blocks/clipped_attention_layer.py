"""The layer of `ClippedAttention`.

Shapes: T tokens (including padding), D model width, H query heads and G KV heads of this rank, d
width of a head, K kernel size of convolutions, R width of a relative state, E distances.
"""

import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.clipped_attention import ClippedAttention
from moeserve.blocks.linear import FP32
from moeserve.blocks.relative_attention import RelativeAttention
from moeserve.blocks.relative_attention_layer import (
    RelativeAttentionLayer,
    RelativeStep,
    prepare_relative,
    with_conv,
)
from moeserve.ops.elementwise import write_kv
from moeserve.ops.inputs import LayerCache, RowContext
from moeserve.ops.relative_attention import relative_attention

CLIP_EPS = 1e-6  # added to the norms of clipped heads


def clip_norms(x_THd: Tensor, threshold: float) -> Tensor:
    """Return heads whose L2 norm is at most `threshold`: longer ones are scaled down. fp32.

    Squares are added in pairs, in an order that depends on the width only.
    """
    squares = x_THd * x_THd
    while (width := squares.shape[-1]) > 1:
        if width % 2:
            squares = torch.nn.functional.pad(squares, (0, 1))
        squares = squares[..., 0::2] + squares[..., 1::2]
    return x_THd * (threshold / (squares.sqrt() + CLIP_EPS)).clamp(max=1.0)


class ClippedAttentionLayer:
    """Attention of this rank's heads. Ranks gather all heads before the output projection."""

    def __init__(self, spec: ClippedAttention, build: Builder, name: str, group: int) -> None:
        self.spec = spec
        self.tp = build.tp
        self.ops = build.ops
        self.eps = build.eps  # of the norm of values
        heads = spec.local_heads(build.world)
        self.num_heads = heads.count
        self.num_kv_heads = heads.count_kv
        self.q, self.k, self.v, self.relative, self.sink, self.gate = (
            build.linear(name + part) for part in ("q", "k", "v", "relative", "sink", "gate")
        )
        self.profiles = build.linear(name + "profiles")  # R -> E
        self.scale_Hd = build.fp32(name + "q_scale")
        self.scale_HR = build.fp32(name + "relative_scale")
        self.ones_d = torch.ones(spec.head_dim, device=build.ops.device)
        self.out = build.columns(name + "out", build.width)
        self.out_conv_DK = build.fp32(name + "out_conv")[:, 0]
        if spec.dynamic:
            # Taps by distance; `ops.causal_conv` has the tap of the token itself last
            self.conv_CK: Tensor = build.slots.load(
                (name + "k_conv", name + "v_conv"),
                lambda ops, k_taps, v_taps: torch.cat((k_taps, v_taps)).float().flip(1),
            )
            self.taps = [build.linear(f"{name}{x}_taps") for x in "kv"]  # D -> G * K
        else:
            self.conv_CK = build.fp32(name + "conv")[:, 0]
        shape = spec.head_shape(self.tp.size)
        self.prepare = prepare_relative(spec, build, group, shape)
        self._attend = self.ops.opaque(relative_attention)

    def __call__(
        self, x_TD: Tensor, step: RelativeStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the layer's output [T, D]. Writes keys, values and states to `cache` first.

        x_TD: in dynamic layers the inputs of queries, keys and values, [T, 3 * D].
        """
        spec = self.spec
        k_cache, v_cache, *states = cache
        x_q, x_k, x_v = (x.contiguous() for x in x_TD.chunk(3, 1)) if spec.dynamic else [x_TD] * 3
        kv_TC = self._convolve(x_k, x_v, (*states[:2],), step, context)
        self._write(kv_TC, (k_cache, v_cache), step)
        q_THd = self.q(x_q, context).view(len(x_q), self.num_heads, -1).float()
        q_THd = clip_norms(q_THd * self.scale_Hd, spec.clip_norm)
        relative_THR = self.relative(x_q, context).view(len(x_q), self.num_heads, -1).float()
        relative_THR = clip_norms(relative_THR * self.scale_HR, spec.relative_clip)
        if step.scale_T11 is not None:
            q_THd = q_THd * step.scale_T11
            relative_THR = relative_THR * step.scale_T11
        rows = relative_THR.flatten(0, 1).to(x_q.dtype)
        biases = self.profiles(rows, RowContext(len(rows), context.channel)).float()
        attended = self._attend(
            (q_THd * spec.head_dim**-0.5).to(x_q.dtype),
            biases.view(len(x_q), self.num_heads, -1),
            (k_cache, v_cache),
            step.plan,
            step.positions_T,
            step.window,
            self.sink(x_q, context).float(),
        )
        attended = self.ops.sigmoid_mul(attended, self.gate(x_q, context))
        y_TD = self.out(self.tp.gather_columns(attended, context.channel), context)
        scale = (spec.conv + 1) ** -0.5
        return with_conv(self.ops, y_TD, self.out_conv_DK, (*states[2:],), step.tiles, scale)

    def _convolve(
        self, x_k: Tensor, x_v: Tensor, cache: LayerCache, step: RelativeStep, context: RowContext
    ) -> Tensor:
        """Return convolved keys and values, fp32 [T, 2 * G * d]."""
        kv_TC = torch.cat((self.k(x_k, context), self.v(x_v, context)), 1).float()
        num_taps = self.spec.conv

        def convolved(weight_CK: Tensor) -> Tensor:
            y_TC: Tensor = self.ops.causal_conv(kv_TC, weight_CK, None, False, cache, step.tiles)
            return y_TC

        total_TC = kv_TC + convolved(self.conv_CK)
        scale: float = (num_taps + 1) ** -0.5
        if not self.spec.dynamic:
            return total_TC * scale
        own_taps = torch.cat([self.taps[i](x, context) for i, x in enumerate((x_k, x_v))], 1)
        taps_TGK = own_taps.float().view(len(x_k), 2 * self.num_kv_heads, num_taps)
        for distance in range(num_taps):
            one_tap = torch.zeros_like(self.conv_CK)
            one_tap[:, num_taps - 1 - distance] = 1.0
            heads_TGd = convolved(one_tap).view(len(x_k), 2 * self.num_kv_heads, -1)
            total_TC = total_TC + (heads_TGd * taps_TGK[:, :, distance, None]).flatten(1)
        scale = (2 * num_taps + 1) ** -0.5
        return total_TC * scale

    def _write(self, kv_TC: Tensor, cache: LayerCache, step: RelativeStep) -> None:
        """Write clipped keys and normed values to the cache."""
        slot_mapping_T = step.rope_cache.slot_mapping_T
        real = kv_TC[: len(slot_mapping_T)].to(self.ops.dtype).float()
        k_TGd, v_TGd = real.view(len(real), 2, self.num_kv_heads, -1).unbind(1)
        k_TGd = clip_norms(k_TGd, self.spec.clip_norm)
        v_rows = v_TGd.reshape(-1, self.spec.head_dim)
        v_TGd = self.ops.rms_norm(v_rows, self.ones_d, self.eps).view(v_TGd.shape)
        k_cache, v_cache = cache
        write_kv(k_TGd, v_TGd, k_cache, v_cache, slot_mapping_T)

    @staticmethod
    def workspace(
        spec: RelativeAttention,
        width: int,
        tokens: int,
        max_len: int,
        itemsize: int,
        tp_size: int,
    ) -> int:
        """See `mixer_workspace`."""
        num_bytes = RelativeAttentionLayer.workspace(
            spec, width, tokens, max_len, itemsize, tp_size
        )
        shape = spec.head_shape(tp_size)
        # Clipped heads: four copies in fp32. Dynamic taps: as many of convolved keys and values.
        heads = shape.num_heads + 2 * shape.num_kv_heads
        num_bytes += tokens * 8 * heads * (shape.dim + spec.relative_dim) * FP32
        return num_bytes + tokens * 3 * width * itemsize  # the inputs of a dynamic layer
