"""The specification of Kimi delta attention: a gated delta net with a decay per key element.

Decays and output gates are low-rank products, through a bottleneck of d elements, or plain products
(Ling 3). Shapes: D model width, H heads, d their width, K kernel size of the convolutions.

Source: Kimi Linear (arXiv 2510.26692). Bounded decays: huggingface.co/inclusionAI/Ling-3.0-Flash.
"""

from dataclasses import dataclass

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, conv_cache, recurrence_cache
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(RecurrentMixer):
    """H heads with a state [d, d] each."""

    tp_units = "num_heads", "recurrent heads"
    num_heads: int
    head_dim: int
    conv: int  # K
    low_rank: bool = True  # decays and output gates are low-rank products
    # The "safe gate": log decays are between this number and 0; None: they are not bounded.
    lower_bound: float | None = None
    flat_decay: bool = False  # the checkpoint's factors of decays are [H], not [1, 1, H, 1]

    @property
    def size(self) -> int:
        """The width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def bottlenecks(self) -> int:
        """The width of the bottlenecks of decays and output gates together."""
        return 2 * self.head_dim if self.low_rank else 0

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolutions' inputs; state, k, u and s of ops/recurrence.py."""
        heads = self.num_heads // tp_size
        width = self.head_dim
        state = recurrence_cache(heads, heads, width, width, decays=width)
        return *conv_cache(3 * heads * width, self.conv), *state

    def products(self, width: int) -> list[tuple[int, int]]:
        inner = self.head_dim if self.low_rank else width
        up = self.size, inner
        narrow = self.bottlenecks + self.num_heads
        return [(3 * self.size, width), (narrow, width), up, up, (width, self.size)]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add in, narrow, conv, decays, gates, decay, dt_bias, norm and out."""
        block = plan.block(param_prefix, tensor_prefix, "self_attn.")
        size = self.size
        d = self.head_dim
        heads = self.num_heads
        inner = d if self.low_rank else plan.width
        decays, gates = ("f_b", "g_b") if self.low_rank else ("f", "g")
        narrow = []
        if self.low_rank:
            narrow = [(f"{x}_proj.weight", d, slice(0, d)) for x in ("f_a", "g_a")]
        block.stack("in", [block.share(f"{x}_proj.weight", size) for x in "qkv"], plan.width)
        block.stack("narrow", [*narrow, block.share("b_proj.weight", heads)], plan.width)
        block.stack(
            "conv",
            [block.share(f"{x}_conv1d.weight", size) for x in "qkv"],
            1,
            self.conv,
            fp32=True,
        )
        block.add("decays", (size, inner), f"{decays}_proj.weight", sharded=True)
        block.add("gates", (size, inner), f"{gates}_proj.weight", sharded=True)
        decay_shape = (heads,) if self.flat_decay else (1, 1, heads, 1)
        block.add("decay", decay_shape, self.decay_tensor, fp32=True)  # not sharded
        block.add("dt_bias", (size,), "dt_bias", sharded=True, fp32=True)
        block.add("norm", (d,), "o_norm.weight")
        block.add("out", (plan.width, size), "o_proj.weight", sharded=True)
