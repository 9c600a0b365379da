"""The specifications of gated residuals: several residual streams without mixing between them.

A block reads a gated mean of the normed streams, and its output is added to each stream with a
weight of its own. With S streams s_1 .. s_S of D elements each, and n their norms:

    m = sigmoid(up(silu(down(n) / S)))
    x = mean over streams of m * n
    s_i <- s_i + 2 * sigmoid(inject(n) / S)_i block(x)

After the last layer, one more gated mean replaces the final norm.

Source: transformers' Qwen4ExpTextGatedResidual (Qwen3.8-Flash-Next). The streams are those of
hyper-connections (arXiv 2409.19606).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.residual import ResidualConnection

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan

_FP32 = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedResidual(ResidualConnection):
    """The gated residual of one block, or of the end of the model."""

    name: str  # of the module in the checkpoint, such as "attn_hyper_connection."
    streams: int  # S
    low_rank: int  # the width between `down` and `up`
    injects: bool = True  # False: no block follows

    def products(self, width: int) -> list[tuple[int, int]]:
        total = self.streams * width
        inject = [(self.streams, total)] if self.injects else []
        return [(self.low_rank, total), (total, self.low_rank), *inject]

    def workspace(self, width: int, tokens: int, itemsize: int) -> int:
        # Streams in fp32: converted, normed, their gates with temporaries, and gated.
        streams = 6 * tokens * self.streams * width * _FP32
        # Normed streams and the product `up`; `down` with temporaries.
        streams += 2 * tokens * self.streams * width * itemsize
        return streams + 6 * tokens * (self.low_rank + 64) * _FP32

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add norm, down, up and inject."""
        block = plan.block(param_prefix, tensor_prefix, self.name)
        total = self.streams * plan.width
        block.add("norm", (total,), "hc_norm.weight")
        block.add("down", (self.low_rank, total), "input_mix_weight_down.weight")
        block.add("up", (total, self.low_rank), "input_mix_weight_up.weight")
        if self.injects:
            block.add("inject", (self.streams, total), "block_inject_weight.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllStreams(ResidualConnection):
    """The connection of a block that reads all streams as they are, and adds to each of them."""

    def workspace(self, width: int, tokens: int, itemsize: int) -> int:
        return 0

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add nothing."""
