"""The specification of a residual connection that attends to earlier blocks of layers (Inkling 2).

Every few layers, the residual stream is kept, and a new one begins with the next output. A block
reads a softmax-weighted sum of the kept streams and the current one, each divided by its RMS. The
weights are those of a learned query. The streams' width grows with the kept streams.

Source: huggingface.co/thinkingmachines/Inkling-2-Small-MXFP8.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.residual import ResidualConnection

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResidual(ResidualConnection):
    """The connection of one block with the streams."""

    query: str = ""  # name of the query's tensor, relative to the model; "": reads the current one
    norms: tuple[str, ...] = ()  # names of the norms of each result, relative to the layer
    outputs: int = 1  # results, and as many queries: the input is [T, outputs * D]
    keeps: bool = False  # the current stream is kept, and the output begins a new one
    streams: int = 1  # that exist when the block reads
    takes: bool = False  # as in `DelayedOutput`
    holds: bool = False

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add query, and norm_0, norm_1, ..."""
        if self.query:
            shape = (plan.width,) if self.outputs == 1 else (self.outputs, plan.width)
            plan.add(param_prefix + "query", shape, plan.names.model + self.query, fp32=True)
        for i, name in enumerate(self.norms):
            plan.add(f"{param_prefix}norm_{i}", (plan.width,), plan.spell(tensor_prefix, name))

    def workspace(self, width: int, tokens: int, itemsize: int) -> int:
        """See `ResidualConnection`: streams before and after, in fp32 and normed, results, sums."""
        fp32_bytes = 4
        per_token = 2 * (self.streams + 1) * (itemsize + fp32_bytes)
        return tokens * width * (per_token + (self.outputs + 3) * fp32_bytes)
