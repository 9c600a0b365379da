"""The layer of a mixture of attention heads: router, queries of the chosen experts, attention, and
the weighted sum of the experts' output projections.

The products of all experts are computed as one. Of the results, the chosen ones are used. Inputs of
experts that were not chosen are 0 in the output product.

Shapes: T tokens (including padding), D model width, E experts, K experts per token, G KV heads of
this rank (of all ranks in gathered tensors), d width of a head.
"""

import torch
from torch import Tensor

from moeserve.blocks.attention_layer import AttentionStep, item_bytes, prepare_attention
from moeserve.blocks.build import Builder
from moeserve.blocks.linear import FP32, gathered_bytes
from moeserve.blocks.mixture_of_attention import MixtureOfAttention
from moeserve.ops.elementwise import HeadRule
from moeserve.ops.inputs import LayerCache, RowContext
from moeserve.ops.rules import RouterRule

_ROUTER = RouterRule(score="softmax_selected")


class MixtureOfAttentionLayer:
    """Attention of the chosen experts' heads over a paged KV cache.

    Tensor-parallel ranks gather the results of all heads before the output projection.
    """

    def __init__(self, spec: MixtureOfAttention, build: Builder, name: str, group: int) -> None:
        """Build the layer. name: prefix of its parameters. group: its KV group."""
        self.spec = spec
        self.tp = build.tp
        self.ops = build.ops
        shape = spec.head_shape(self.tp.size)
        self.rule = HeadRule(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            scale=spec.head_dim**-0.5,
            eps=build.eps,
        )
        self.qkv = build.linear(name + "qkv")  # D -> E * G * d + 2 * G * d
        self.router = build.linear(name + "attn_router")  # D -> E
        self.out = build.columns(name + "out", build.width)  # E * G * d -> D
        self.prepare = prepare_attention(build, group, shape, spec.rope, spec.head_dim, None)
        # Opaque to torch.compile, because `attend` may end one CUDA graph and begin another.
        self._attend = self.ops.opaque(AttentionStep.attend)

    def __call__(
        self, x_TD: Tensor, step: AttentionStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the layer's output [T, D]. Writes the new keys and values to `cache` first."""
        ids_TK, weights_TK = self.ops.route(self.router(x_TD, context), self.spec.top_k, _ROUTER)
        ids_TK1 = ids_TK.long()[:, :, None]
        qkv_TN = self._chosen_heads(self.qkv(x_TD, context), ids_TK1)
        q_THd = self.ops.qk_norm_rope_cache(qkv_TN, self.rule, step.rope_cache, cache, None)
        attended = self._attend(step, self.ops, q_THd, cache)
        all_TN = self.tp.gather_columns(attended, context.channel)
        return self.out(self._by_expert(all_TN, ids_TK1, weights_TK), context)

    def _chosen_heads(self, qkv_TN: Tensor, ids_TK1: Tensor) -> Tensor:
        """Return the chosen experts' queries and the keys and values, [T, (K * G + 2 * G) * d].

        The queries of a KV head are adjacent.
        """
        kv = self.rule.num_kv_heads * self.spec.head_dim
        num_queries = self.spec.num_experts * kv
        queries = qkv_TN[:, :num_queries].view(len(qkv_TN), -1, kv)
        chosen = queries.gather(1, ids_TK1.expand(-1, -1, kv))
        by_kv_head = chosen.view(*chosen.shape[:2], -1, self.spec.head_dim).transpose(1, 2)
        return torch.cat((by_kv_head.flatten(1), qkv_TN[:, num_queries:]), 1)

    def _by_expert(self, all_TN: Tensor, ids_TK1: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted results of heads as inputs of all experts, [T, E * G * d]."""
        spec = self.spec
        by_kv_head = all_TN.view(len(all_TN), -1, spec.top_k, spec.head_dim)
        weighted = (by_kv_head * weights_TK[:, None, :, None]).to(all_TN.dtype)
        by_choice = weighted.transpose(1, 2).flatten(2)  # [T, K, G * d]
        width = by_choice.shape[2]
        inputs = by_choice.new_zeros((len(all_TN), spec.num_experts, width))
        return inputs.scatter_(1, ids_TK1.expand(-1, -1, width), by_choice).flatten(1)

    @staticmethod
    def workspace(
        spec: MixtureOfAttention, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        shape = spec.head_shape(tp_size)
        d = spec.head_dim
        kv = shape.num_kv_heads * d
        heads = shape.num_heads * d
        # The product qkv, the chosen queries twice, and the inputs of all experts.
        num_bytes = tokens * (spec.num_experts + 2) * kv * itemsize
        num_bytes += tokens * (2 * heads + spec.num_experts * spec.num_kv_heads * d) * itemsize
        # Queries and keys in fp32: converted, rotated and scaled. Then rounded.
        num_bytes += tokens * (heads + kv) * (4 * FP32 + itemsize)
        # The results of all heads in fp32, weighted and rounded.
        num_bytes += tokens * heads * tp_size * (FP32 + 2 * itemsize)
        num_bytes += gathered_bytes(tokens, heads * tp_size + width, itemsize, tp_size)
        return num_bytes + item_bytes(shape, max_len, itemsize)
