"""The specification of n-gram embeddings: rows of a large table, added to the residual streams.

A token's n-grams select rows of the table (ops/ngrams.py), which are concatenated to an embedding
e. With S streams s_1 .. s_S of D elements each, and norms per stream:

    g_i = <norm(key(e))_i, norm(s_i)> / sqrt(D)
    v_i = sigmoid(sign(g_i) sqrt(max(|g_i|, 1e-6))) value(e)
    s <- s + v + silu(conv(norm(v)))

The convolution is causal, depthwise and dilated. The table stays in the checkpoint's files
(loader/row_table.py). The block is not sharded: each rank computes all of it.

Shapes: D model width, C = S * D width of the streams, E width of e, K kernel size of the
convolution.

Source: transformers' Qwen4ExpTextPLELayer (per-layer embedding of Qwen3.8-Flash-Next).
"""

from dataclasses import dataclass
from typing import ClassVar

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, conv_cache
from moeserve.blocks.weights import BlockPlan, WeightPlan

MAX_TP = 1024
GGUF_TABLE = "per_layer_token_embd.weight"
_TABLE = "ple_embedding.ngram_embedding."


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramEmbedding(RecurrentMixer):
    """N-gram embeddings. The input and output are all residual streams."""

    tp_units: ClassVar[tuple[str, str]] = ("streams", "n-gram embeddings")
    streams: int  # S
    channels: int  # C
    embed_dim: int  # E
    kernel: int  # K
    dilation: int  # of the convolution
    # The constants of `NgramHash`, if the checkpoint has none, as integers
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end_id: int
    rows: int  # of the table
    shards: int  # tensors of the table, of about equal size

    @property
    def taps(self) -> int:
        """The tokens that the convolution reaches, of which it uses every `dilation`-th."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def possible_tp(self) -> list[int]:
        """Any number: nothing is divided."""
        return list(range(1, MAX_TP + 1))

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolution's inputs."""
        return conv_cache(self.channels, self.taps)

    def products(self, width: int) -> list[tuple[int, int]]:
        return [(self.channels + width, self.embed_dim)]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add ngram_in (keys and values), conv, the norms, the table and the hash's constants."""
        block = plan.block(param_prefix, tensor_prefix, "ple.")
        channels = self.channels
        parts = [("key_proj.weight", channels), ("value_proj.weight", plan.width)]
        block.stack(
            "ngram_in", [(name, rows, slice(0, rows)) for name, rows in parts], self.embed_dim
        )
        for norm in ("norm_key", "norm_query", "norm_conv"):
            block.add(norm, (channels,), norm + ".weight")
        block.add("conv", (channels, 1, self.kernel), "conv1d.weight", fp32=True)
        self._plan_table(block)
        for param, values in self.constants.items():
            name = f"ple_embedding.{param}"
            if plan.spell(tensor_prefix, block.module + name) in plan.present:
                count = len(values)
                block.pick(param, [(name, count, slice(0, count))], int64=True)

    @property
    def constants(self) -> dict[str, tuple[int, ...]]:
        """The hash's constants, by the checkpoint's name."""
        return {
            "layer_multipliers": self.multipliers,
            "ngram_heads_vocab_sizes": self.sizes,
            "ngram_heads_offsets": self.offsets,
        }

    def _plan_table(self, block: BlockPlan) -> None:
        """Add the table. Its shards have the same size, except for the last one."""
        width = self.embed_dim // len(self.sizes)
        if GGUF_TABLE in block.plan.present:
            param = block.param_prefix + "ngram_table"
            source = (GGUF_TABLE, self.rows, slice(0, self.rows))
            block.plan.pick(param, [source], width, on_disk=True)
            return
        size = -(-self.rows // self.shards)
        starts = range(0, self.rows, size)
        sources = []
        for i, start in enumerate(starts):
            rows = min(size, self.rows - start)
            sources.append((f"{_TABLE}shard_{i}.weight", rows, slice(0, rows)))
        if len(starts) == 1:
            sources = [(f"{_TABLE}weight", self.rows, slice(0, self.rows))]
        block.pick("ngram_table", sources, width, on_disk=True)
