"""The block-sparse attention layer: index heads, block selection, attention to selected blocks.

Queries that see at most `top_k` blocks attend to all of them and need no selection.

Shapes: T tokens (including padding), S of which select, D model width, H query heads and G KV heads
of this rank, d width of a head.
"""

from functools import partial

from torch import Tensor

from moeserve.blocks.attention import Attention
from moeserve.blocks.attention_layer import AttentionLayer, AttentionStep
from moeserve.blocks.block_sparse_attention import BlockSparseAttention
from moeserve.blocks.build import Builder
from moeserve.blocks.indexer_layer import SelectedRows, prepare_selection
from moeserve.blocks.linear import FP32, INT64
from moeserve.blocks.rope import half_layout
from moeserve.ops.attention import MAX_SCORES, padded_context
from moeserve.ops.elementwise import rotary
from moeserve.ops.inputs import HeadShape, LayerCache, RowContext
from moeserve.ops.selected import MAX_QUERIES, MIN_KEYS
from moeserve.ops.selected_blocks import BlockRule, blocks_as_requests, select_blocks
from moeserve.ops.table import Ops


def attend_to_blocks(
    step: AttentionStep,
    ops: Ops,
    q_THd: Tensor,
    cache: LayerCache,
    sinks_H: Tensor | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Return attention over the cache, [T, H * v]; selecting queries see selected blocks only."""
    rows: SelectedRows = step.plan
    attention = ops.attention
    if sinks_H is not None or soft_cap:
        attention = partial(attention, sinks_H=sinks_H, soft_cap=soft_cap)
    if rows.selection is None:
        return attention(q_THd, *cache, rows.plain)
    out = q_THd.new_zeros((len(q_THd), step.width))
    if rows.plain is not None:
        other_tokens = rows.selection.other_tokens
        out[other_tokens] = attention(q_THd.index_select(0, other_tokens), *cache, rows.plain)
    tokens_S = rows.selection.tokens_S
    num_kv_heads, dim = cache[0].shape[2:]
    by_kv_head = q_THd.index_select(0, tokens_S).view(len(tokens_S) * num_kv_heads, -1, dim)
    entries = [tensor.view(-1, 1, 1, tensor.shape[3]) for tensor in cache]
    out[tokens_S] = attention(by_kv_head, *entries, rows.chosen).view(len(tokens_S), -1)
    return out


class BlockSparseAttentionLayer(AttentionLayer):
    """Grouped-query attention of this rank's heads to the blocks that its index heads select."""

    def __init__(self, spec: BlockSparseAttention, build: Builder, name: str, group: int) -> None:
        super().__init__(spec, build, name, group)
        dim = spec.head_dim
        num_kv_heads = self.rule.num_kv_heads
        if (order := half_layout(spec.rope, dim)) is not None:
            rows = [head * dim + i for head in range(num_kv_heads) for i in order]
            build.reorder(name + "index_q", rows)
            for part in ("k", "q_norm", "k_norm"):
                build.reorder(f"{name}index_{part}", order)
        self.index_queries = build.linear(name + "index_q")  # D -> G * d
        self.index_keys = build.linear(name + "index_k")  # D -> d
        self.index_norms = build.norm(name + "index_q_norm"), build.norm(name + "index_k_norm")
        self.blocks = BlockRule(spec.block_size, spec.top_k, spec.local)
        heads_per_kv_head = self.rule.num_heads // num_kv_heads
        self._chosen_shape = HeadShape(heads_per_kv_head, 1, dim, spec.value_dim)
        self.prepare = prepare_selection(build, self.prepare, self.blocks.tokens)
        self._attend = self.ops.opaque(attend_to_blocks)
        self._choose = self.ops.opaque(self.choose)

    def __call__(
        self, x_TD: Tensor, step: AttentionStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the layer's output [T, D]. Writes keys, values and index keys to `cache` first."""
        *kv, index = cache
        self.write_index(x_TD, step, index, context)
        rows: SelectedRows = step.plan
        if self.fused_call is not None and rows.selection is None:
            return self.fused(x_TD, step.rope_cache, tuple(kv), rows.plain, context)
        if rows.selection is not None:
            self._choose(x_TD, step, index, context)
        return self.unfused(x_TD, step, tuple(kv), context)

    def write_index(
        self, x_TD: Tensor, step: AttentionStep, cache: Tensor, context: RowContext
    ) -> None:
        """Write the tokens' index keys, after norm and rope in fp32, to `cache`."""
        cos_T1d, sin_T1d, slot_mapping_T = step.rope_cache
        real = len(slot_mapping_T)
        keys_Td = self.index_keys(x_TD, context)[:real].float()
        k_T1d = self.ops.rms_norm(keys_Td, self.index_norms[1], self.rule.eps)[:, None]
        k_T1d = rotary(k_T1d, cos_T1d[:real], sin_T1d[:real])
        cache.view(-1, cache.shape[3]).index_copy_(0, slot_mapping_T, k_T1d[:, 0].to(cache.dtype))

    def choose(self, x_TD: Tensor, step: AttentionStep, cache: Tensor, context: RowContext) -> None:
        """Select blocks, and plan attention to them. cache: of index keys."""
        rows: SelectedRows = step.plan
        assert rows.selection is not None
        tokens_S = rows.selection.tokens_S
        dim = self.spec.head_dim
        cos, sin = (table.index_select(0, tokens_S) for table in step.rope_cache[:2])
        products = self.index_queries(x_TD.index_select(0, tokens_S), context.select(tokens_S))
        normed = self.ops.rms_norm(
            products.float().view(-1, dim), self.index_norms[0], self.rule.eps
        )
        q_SGd = rotary(normed.view(len(tokens_S), -1, dim), cos, sin).to(x_TD.dtype)
        slots = select_blocks(q_SGd, cache, rows.selection, self.blocks, self.ops.pack_heads)
        inputs = blocks_as_requests(slots, rows.group, rows.step, rows.selection, self.blocks)
        rows.chosen = self.ops.plan_attention(*inputs, self._chosen_shape)

    @staticmethod
    def workspace(
        spec: Attention, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        assert isinstance(spec, BlockSparseAttention)
        num_bytes = AttentionLayer.workspace(spec, width, tokens, max_len, itemsize, tp_size)
        num_kv_heads = spec.local_kv_heads(tp_size)
        dim = spec.head_dim
        shape = spec.head_shape(tp_size)
        # The inputs, queries and results of selecting tokens.
        num_bytes += tokens * (width + shape.num_heads * (dim + 2 * shape.v_dim)) * itemsize
        # Index queries and keys: the products, and five fp32 copies of norm and rope.
        num_bytes += tokens * (num_kv_heads + 1) * dim * (2 * itemsize + 5 * FP32)
        # Eight arrays with the selected positions of each token and KV head.
        num_bytes += (
            8 * tokens * num_kv_heads * padded_context(spec.top_k * spec.block_size) * INT64
        )
        # Six arrays of as many keys or products as are in memory at once.
        num_bytes += 6 * max(MAX_SCORES, (num_kv_heads + dim) * MIN_KEYS) * FP32
        # Six arrays with one element per query of a chunk, index head and block of its context;
        # the slots of the context.
        blocks = -(-max_len // spec.block_size)
        num_bytes += 6 * MAX_QUERIES * num_kv_heads * blocks * INT64
        return num_bytes + 4 * padded_context(max_len) * INT64
