"""The specification of a residual connection whose residual is the block's normed input.

    x = norm(stream)
    stream = alpha * x + beta * block(x)

Source: MiniMax-01 (arXiv 2501.08313), which scales as DeepNorm does (arXiv 2203.00555).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.residual import ResidualConnection

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedResidual(ResidualConnection):
    """The connection of one block with the residual stream."""

    norm: str  # name of the norm's tensor in the checkpoint
    alpha: float = 1.0  # factor of the residual
    beta: float = 1.0  # factor of the block's output

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add norm."""
        plan.add(param_prefix + "norm", (plan.width,), plan.spell(tensor_prefix, self.norm))
