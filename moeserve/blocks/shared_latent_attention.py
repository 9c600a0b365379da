"""The specification of latent attention whose latents several layers share (Mistral Large 4).

Shapes: D model width, H heads, n and p the parts of a query and of a key without and with rotary
embedding, v width of values, L rank of the latents, C = L + p width of a cache entry, J index
heads.

It differs from `LatentAttention`:

- A layer may attend to the latents of an earlier layer. Then it has no latents of its own.
- In layers without rotary embedding, the part p of heads belongs to n.
- The frequencies of the rotary embedding are multiplied by exp(alpha), with learned alphas.
- The queries of each head are multiplied by a * log(position + 1) + b, with learned a and b.
- Queries are one product. Index queries are a product of the block's input, after a layer norm.
- Layers with different rotary embeddings may share a selection.

Sources: huggingface.co/mistralai/Mistral-Large-4-1T-A52B; DeepSeek-V2 (arXiv 2405.04434),
DeepSeek-V3.2 (arXiv 2512.02556).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.mixer import CacheRead, CacheTensor, Mixer
from moeserve.blocks.rope import RopeSpec
from moeserve.comm.world import World

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan
    from moeserve.ops.inputs import HeadShape


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLatentAttention(Mixer):
    """Attention of H heads to one latent per token, selected by index heads."""

    tp_units = "num_heads", "heads on latents"
    num_heads: int  # H
    key_dim: int  # n + p
    rotated: int  # the last elements of a key, to which rope applies in layers that rotate
    v_dim: int
    rank: int  # L
    rope: RopeSpec
    rotates: bool = True
    bias: bool = False  # whether the product to latents and the output projection have biases
    scale: float  # factor of scores
    # False: attends to the latents of the nearest earlier layer that shares some and rotates alike
    owns_latents: bool = True
    shares_latents: bool = False  # later layers attend to the layer's latents
    index_heads: int  # J
    index_dim: int
    top_k: int  # tokens that a query attends to
    # False: uses the selection of the nearest earlier layer that selects
    selects: bool = True

    @property
    def rope_dim(self) -> int:
        """The part of a key with rotary embedding, p."""
        return self.rotated if self.rotates else 0

    @property
    def nope_dim(self) -> int:
        """The part of a key without rotary embedding, n."""
        return self.key_dim - self.rope_dim

    @property
    def entry(self) -> int:
        """The width of a cache entry, C."""
        return self.rank + self.rope_dim

    def heads(self, world: World) -> slice:
        """Return this rank's heads."""
        assert self.num_heads % world.tp_size == 0, (world, self)
        count = self.num_heads // world.tp_size
        return slice(world.tp_rank * count, (world.tp_rank + 1) * count)

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        tensors = (
            (self.owns_latents, CacheTensor("latent", 1, self.entry)),
            (self.selects, CacheTensor("index", 1, self.index_dim)),
        )
        return tuple(tensor for is_own, tensor in tensors if is_own)

    def head_shape(self, tp_size: int) -> "HeadShape":
        from moeserve.ops.inputs import HeadShape  # has torch

        return HeadShape(self.num_heads // tp_size, 1, self.entry, self.rank)

    def reads(self, tp_size: int) -> tuple[CacheRead, ...]:
        """See `Mixer`. Index heads read all index keys; attention reads the selected latents."""
        operations = 2 * self.num_heads // tp_size * (self.entry + self.rank)
        selected = CacheRead(self.top_k, self.entry, operations)
        if not self.selects:
            return (selected,)
        return selected, CacheRead(None, self.index_dim, 2 * self.index_heads * self.index_dim)

    def products(self, width: int) -> list[tuple[int, int]]:
        products = [
            (self.num_heads * self.key_dim, width),
            (self.num_heads * (self.nope_dim + self.v_dim), self.rank),
            (width, self.num_heads * self.v_dim),
        ]
        if self.owns_latents:
            products.append((self.entry, width))
        if self.selects:
            rows = self.index_heads * self.index_dim + self.index_dim + self.index_heads
            products.append((rows, width))
        return products

    def obstacle(self, kernels: str) -> str:
        return "FlashAttention-3 does not support shared latents" if kernels == "fa3" else ""

    def cache_obstacle(self, dtype: str) -> str:
        if dtype in ("auto", "float"):
            return ""
        return "latents (MLA) are cached in the dtype of activations only"

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add q, kv_b, out, scale and scale_bias, if the layer has its own: kv_a and kv_norm, and
        the parameters of index heads. The first layer adds rope_alpha, which all layers share.
        """
        if all(param.name != "rope_alpha" for param in plan.params):
            alpha = plan.spell(plan.names.model, "rotary_emb.alpha")
            plan.add("rope_alpha", (self.rotated // 2,), alpha, fp32=True)
        block = plan.block(param_prefix, tensor_prefix, "self_attn.")
        heads = self.num_heads
        width = plan.width
        block.add("q", (heads * self.key_dim, width), "q_proj.weight", sharded=True)
        block.add("scale", (heads,), "softmax_scaling.scale", sharded=True)
        block.add("scale_bias", (heads,), "softmax_scaling.bias", sharded=True)
        if self.owns_latents:
            block.add("kv_a", (self.entry, width), "kv_a_proj_with_mqa.weight")
            if self.bias:
                block.add("kv_a_bias", (self.entry,), "kv_a_proj_with_mqa.bias")
            block.add("kv_norm", (self.rank,), "kv_a_layernorm.weight")
        up_and_down = block.share("kv_b_proj.weight", heads * (self.nope_dim + self.v_dim))
        block.stack("kv_b", [up_and_down], self.rank, widened=True)
        block.add("out", (width, heads * self.v_dim), "o_proj.weight", sharded=True)
        if self.bias:
            block.add("out_bias", (width,), "o_proj.bias", sharded=True)
        if self.selects:
            self._plan_index(plan, param_prefix + "index_", tensor_prefix)

    def _plan_index(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        block = plan.block(param_prefix, tensor_prefix, "self_attn.indexer.")
        heads = self.index_heads
        dim = self.index_dim
        block.add("input_norm", (plan.width,), "q_input_norm.weight")
        block.add("input_norm_bias", (plan.width,), "q_input_norm.bias")
        block.add("q", (heads * dim, plan.width), "wq_b.weight")
        block.add("scale", (heads,), "softmax_scaling.scale")
        block.add("scale_bias", (heads,), "softmax_scaling.bias")
        block.add("k", (dim, plan.width), "wk.weight")
        block.add("norm", (dim,), "k_norm.weight")
        block.add("norm_bias", (dim,), "k_norm.bias")
        weights = "weights_proj.weight", heads, slice(0, heads)
        block.stack("weights", [weights], plan.width, widened=True, fp32=True)
