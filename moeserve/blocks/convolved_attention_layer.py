"""The layers of compressed convolutional attention (blocks/convolved_attention.py).

Shapes: T tokens (including padding), D model width, H query heads and G KV heads of this rank, d
their width, C = (H + G) * d channels of the convolutions.
"""

from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.attention_layer import AttentionStep, item_bytes, prepare_attention
from moeserve.blocks.build import Builder
from moeserve.blocks.convolved_attention import ConvolvedAttention, ConvolvedHeads
from moeserve.blocks.linear import FP32, gathered_bytes
from moeserve.blocks.mixer import Prepare
from moeserve.blocks.recurrent_layer import PrepareTiles
from moeserve.blocks.rope import half_layout
from moeserve.ops.elementwise import HeadRule
from moeserve.ops.inputs import LayerCache, RowContext
from moeserve.ops.rules import TILE
from moeserve.ops.table import Ops

_EPS = 1e-14  # of the norms of heads: as good as 0, as lengths of at least 1e-7 are not limited


class ConvolvedHeadsLayer:
    """Makes this rank's queries, keys and values, [T, (H + 2 G) * d]."""

    def __init__(self, spec: ConvolvedHeads, build: Builder, name: str, group: int) -> None:
        """Build the layer. name: prefix of its parameters. group: its KV group."""
        ops = build.ops
        self.ops = ops
        tp = build.tp
        dim = spec.head_dim
        self.dim = dim
        self.heads = spec.num_heads // tp.size
        self.kv_heads = spec.num_kv_heads // tp.size
        self.prepare: Prepare = build.shared(("tiles", group), lambda: PrepareTiles(ops, group))
        self.qkv = build.linear(name + "qkv")  # D -> (H + 2 G) * d
        self.conv_CK = build.fp32(name + "conv")[:, 0]
        heads = self.heads + self.kv_heads

        def pack_mix(
            ops: Ops, mix: Tensor, mix_bias_C: Tensor, conv_bias_C: Tensor
        ) -> tuple[Any, Tensor]:
            """Return the products of heads [d, 2 d], and the bias of both convolutions.

            The first convolution has its bias before the first token, too.
            """
            mix_Hdn = mix.view(heads, dim, 2 * dim)
            bias_HN = conv_bias_C.view(heads, dim, 1).expand(-1, -1, 2).flatten(1)
            moved_Hd = (mix_Hdn.double() * bias_HN[:, None].double()).sum(-1)
            bias_C = (moved_Hd.flatten() + mix_bias_C.double()).float()
            return ops.pack_heads(mix_Hdn.to(ops.dtype)), bias_C

        names = [name + part for part in ("mix", "mix_bias", "conv_bias")]
        self.mix, self.bias_C = build.slots.load(names, pack_mix)
        width = self.kv_heads * dim
        channels = heads * dim + width
        # A convolution that returns the input of the token before
        self.delay_C2 = torch.tensor([1.0, 0.0], device=ops.device).repeat(channels, 1)
        elements = torch.arange(tp.rank * width, (tp.rank + 1) * width, device=ops.device)
        self.is_delayed = elements >= spec.num_kv_heads * dim // 2

    def __call__(self, x_TD: Tensor, step: Any, cache: LayerCache, context: RowContext) -> Tensor:
        """Return queries, keys and values. Writes the convolutions' inputs to `cache`."""
        ops = self.ops
        channels = len(self.bias_C)
        in_TN = self.qkv(x_TD, context).float()
        qk_TC = in_TN[:, :channels].contiguous()
        values = in_TN[:, channels:]
        conv, border, delay, delay_border = cache
        z_TC = ops.causal_conv(qk_TC, self.conv_CK, None, False, (conv, border), step)
        z_and_values = torch.cat((z_TC, values), 1)
        before = ops.causal_conv(
            z_and_values, self.delay_C2, None, False, (delay, delay_border), step
        )
        mixed_TC = self._mix(before[:, :channels], z_TC) + self.bias_C + self._means(qk_TC)
        values = torch.where(self.is_delayed, before[:, channels:], values)
        return torch.cat((mixed_TC, values), 1).to(x_TD.dtype)

    def _mix(self, before_TC: Tensor, z_TC: Tensor) -> Tensor:
        """Return the second convolution without its bias, fp32 [T, C].

        before_TC: the results of the first one for the tokens before.
        """
        heads = self.heads + self.kv_heads
        shape = (len(z_TC), heads, self.dim)
        pairs = torch.stack((before_TC.reshape(shape), z_TC.view(shape)), -1)
        mixed_THd: Tensor = self.mix(pairs.flatten(2).to(self.ops.dtype))
        return mixed_THd.float().flatten(1)

    def _means(self, qk_TC: Tensor) -> Tensor:
        """Return what is added to convolved queries and keys, fp32 [T, C].

        That is the mean of a query and its key, and for a key the mean over its queries.
        """
        heads_THd = qk_TC.view(len(qk_TC), -1, self.dim)
        queries = heads_THd[:, : self.heads]
        keys = heads_THd[:, self.heads :]
        grouped = queries.reshape(len(qk_TC), self.kv_heads, -1, self.dim)
        means = (grouped + keys[:, :, None]) * 0.5
        per_kv_head = means.shape[2]
        total = means[:, :, 0]
        for i in range(1, per_kv_head):  # a fixed order
            total = total + means[:, :, i]
        return torch.cat((means.flatten(1), (total / per_kv_head).flatten(1)), 1)

    @staticmethod
    def workspace(
        spec: ConvolvedHeads, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        heads = (spec.num_heads + 2 * spec.num_kv_heads) // tp_size
        # The product, pairs of tokens, their products and the result, rounded. In fp32: the
        # product, both convolutions with their inputs, pairs, means, sums.
        num_bytes = tokens * heads * spec.head_dim * (5 * itemsize + 12 * FP32)
        # Inside of a convolution: four copies of a tile with the inputs before it.
        num_bytes += 4 * (TILE + spec.conv) * heads * spec.head_dim * FP32
        return num_bytes + tokens * width * 2 * FP32  # the residual stream in fp32


class ConvolvedAttentionLayer:
    """Attention of this rank's heads over a paged KV cache.

    Tensor-parallel ranks gather the results of all heads before the output projection.
    """

    def __init__(self, spec: ConvolvedAttention, build: Builder, name: str, group: int) -> None:
        """Build the layer. name: prefix of its parameters. group: its KV group."""
        ops = build.ops
        self.ops = ops
        self.tp = build.tp
        dim = spec.head_dim
        shape = spec.head_shape(self.tp.size)
        heads = shape.num_heads + shape.num_kv_heads

        def pack_norms(ops: Ops, factors_G: Tensor) -> Tensor:
            ones = torch.ones(shape.num_heads, dim, device=factors_G.device)
            return torch.cat((ones, factors_G.float()[:, None].expand(-1, dim)))

        norms = build.slots.load((name + "key_factor",), pack_norms)
        self.rule = HeadRule(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            scale=dim**-0.5,
            eps=_EPS,
            norms=norms,
        )
        self.order = None  # of the elements of the input, which makes pairs half a head apart
        if (order := half_layout(spec.rope, dim)) is not None:
            moved = [head * dim + i for head in range(heads) for i in order]
            values = range(len(moved), len(moved) + shape.num_kv_heads * dim)
            self.order = torch.tensor([*moved, *values], device=ops.device)
        self.out = build.columns(name + "out", build.width)  # H * d of all ranks -> D
        self.prepare = prepare_attention(build, group, shape, spec.rope, dim, None)
        # Opaque to torch.compile, because `attend` may end one CUDA graph and begin another.
        self._attend = ops.opaque(AttentionStep.attend)

    def __call__(
        self, x_TN: Tensor, step: AttentionStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the output [T, D]. Writes the new keys and values to `cache` first.

        x_TN: queries, keys and values.
        """
        if self.order is not None:
            x_TN = x_TN.index_select(1, self.order)
        q_THd = self.ops.qk_norm_rope_cache(x_TN, self.rule, step.rope_cache, cache, None)
        attended = self._attend(step, self.ops, q_THd, cache)
        return self.out(self.tp.gather_columns(attended, context.channel), context)

    @staticmethod
    def workspace(
        spec: ConvolvedAttention, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        shape = spec.head_shape(tp_size)
        queries = shape.num_heads * spec.head_dim
        kv = shape.num_kv_heads * spec.head_dim
        # The input, also in another order. Queries and keys in fp32: converted, normed, weighted,
        # and rotated. Then rounded.
        num_bytes = tokens * 2 * (queries + 2 * kv) * itemsize
        num_bytes += tokens * (queries + kv) * (5 * FP32 + itemsize)
        num_bytes += tokens * 2 * queries * itemsize  # the queries and results of attention
        num_bytes += gathered_bytes(tokens, queries * tp_size + width, itemsize, tp_size)
        num_bytes += tokens * width * 2 * FP32  # the residual stream in fp32
        return num_bytes + item_bytes(shape, max_len, itemsize)
