"""The specification of a residual connection with a shortcut over several blocks.

The output of a block may have two halves, [block(x), aside(x)]. The first half is added to the
residual stream. The second half is added after a later block:

    stream = stream + block(x)                 (a connection that sets the second half aside)
    stream = stream + block(x) + aside         (the connection that `adds_aside`)

Source: ScMoE (arXiv 2404.05019), LongCat-Flash (2509.01322).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.residual import ResidualConnection

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortcut(ResidualConnection):
    """The connection of one block with the residual stream."""

    norm: str  # name of the norm's tensor in the checkpoint
    sets_aside: bool = False  # the block's output has two halves
    adds_aside: bool = False  # the half that was set aside is added after this block

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add norm."""
        plan.add(param_prefix + "norm", (plan.width,), plan.spell(tensor_prefix, self.norm))
