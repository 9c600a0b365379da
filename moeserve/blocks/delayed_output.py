"""The specification of a residual connection that passes a block's output to the next block.

The next block's result, instead of the output itself, is added to the residual stream (Inkling).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.residual import ResidualConnection

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedOutput(ResidualConnection):
    """The connection of one block with the residual stream."""

    takes: bool = False  # the block's input is the output of the block before, which held it
    holds: bool = False  # the block's output is held for the next block, and not added

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add nothing."""
