"""The specifications of hyper-connections: several residual streams, mixed around each block.

A block reads a weighted sum of the streams, and its output is added to each stream with a weight of
its own. The streams are mixed by a matrix whose rows and columns sum to 1. All these coefficients
are functions of the token's streams:

    pre, post, mix = split(W rms_norm(streams) * scale + base)
    x = sum over streams j of (sigmoid(pre_j) + eps) s_j
    s_k <- post_factor * sigmoid(post_k) block(x) + sum over streams j of M_jk s_j

M is softmax(mix) + eps, of which columns, then rows and columns in turns, are divided by their sums
(Sinkhorn and Knopp 1967). The norm has no weights.

The last norm of the model reads one more sum of the streams, or their mean.

Sources: hyper-connections (arXiv 2409.19606); manifold-constrained hyper-connections (arXiv
2512.24880), of DeepSeek-V4 and GLM-5.3; independent hyper-connections, without M (Hy4).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.residual import ResidualConnection

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan

_FP32 = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnection(ResidualConnection):
    """The hyper-connection of one block with the streams."""

    name: str  # of the module in the checkpoint, such as "attn_hc."
    streams: int  # S
    norm_eps: float
    eps: float = 1e-6  # added to the weights of the block's input, and to sums
    post_factor: float = 2.0
    post_eps: float = 0.0  # added to the weights of the block's output
    rounds: int = 20  # normalizations of columns; 0: streams are not mixed (Hy4)

    @property
    def coefficients(self) -> int:
        """The number of coefficients of a token: pre, post and mix."""
        return self.streams * (2 + (self.streams if self.rounds else 0))

    @property
    def parts(self) -> tuple[int, ...]:
        """The number of coefficients with a common scale: those of pre, of post, and of mix."""
        mixing = (self.streams**2,) if self.rounds else ()
        return (self.streams, self.streams, *mixing)

    def products(self, width: int) -> list[tuple[int, int]]:
        return [(self.coefficients, self.streams * width)]

    def workspace(self, width: int, tokens: int, itemsize: int) -> int:
        # Streams in fp32: converted and normed, or the sum and two of its terms.
        streams = 3 * tokens * self.streams * width * _FP32
        # Each coefficient several times, padded to whole vectors.
        return streams + 8 * tokens * (self.coefficients + 64) * _FP32

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add fn (W), base and scale."""
        block = plan.block(param_prefix, tensor_prefix, self.name)
        block.add("fn", (self.coefficients, self.streams * plan.width), "fn", fp32=True)
        block.add("base", (self.coefficients,), "base", fp32=True)
        block.add("scale", (len(self.parts),), "scale", fp32=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperCollapse(ResidualConnection):
    """The weighted sum of the streams that the model's last norm reads."""

    name: str = "hc_head.hc_"  # prefix of the tensors in the checkpoint
    streams: int  # S
    norm_eps: float
    eps: float = 1e-6  # added to the weights

    def products(self, width: int) -> list[tuple[int, int]]:
        return [(self.streams, self.streams * width)]

    def workspace(self, width: int, tokens: int, itemsize: int) -> int:
        return 3 * tokens * self.streams * width * _FP32 + 8 * tokens * 64 * _FP32

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add fn (W), base and scale."""
        block = plan.block(param_prefix, tensor_prefix, self.name)
        block.add("fn", (self.streams, self.streams * plan.width), "fn", fp32=True)
        block.add("base", (self.streams,), "base", fp32=True)
        block.add("scale", (1,), "scale", fp32=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanCollapse(ResidualConnection):
    """The mean of the streams as the input of the model's last norm (GLM-5.3)."""

    streams: int  # S

    def workspace(self, width: int, tokens: int, itemsize: int) -> int:
        return 2 * tokens * self.streams * width * _FP32

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add nothing."""
