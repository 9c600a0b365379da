"""The specifications of ZAYA's residual connections.

The residual stream is fp32, and it and the output of a block each have a bias and a factor per
channel:

    stream = (stream + residual_bias) * residual_scale + (block(x) + output_bias) * output_scale

Attention consists of two blocks: the output of the first one is the input of the second one
(`HeldOutput`). Routers read a projection of their input, to which that of the layer before is added
(`router`).

Source: ZAYA1 (arXiv 2511.17127).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.residual import ResidualConnection

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutput(ResidualConnection):
    """A block reads the normed stream, and the next block reads its output."""

    norm: str  # name of the norm's tensor in the checkpoint
    # Name of the model's factors of embeddings, with a bias; "": the block is not the first one
    embeddings: str = ""

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add norm, and for embeddings scale and bias."""
        plan.add(param_prefix + "norm", (plan.width,), plan.spell(tensor_prefix, self.norm))
        if self.embeddings:
            for part in ("scale", "bias"):
                source = f"{plan.names.model}{self.embeddings}_{part}"
                plan.add(param_prefix + part, (plan.width,), source, fp32=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledResidual(ResidualConnection):
    """The output of a block is added to the stream, both scaled."""

    module: str  # name of the module with biases and factors
    norm: str = ""  # the norm of the block's input; "": the input is the output of the block before
    router: int = 0  # R, the width of the projection that the block's router reads
    is_first_router: bool = False  # there is no projection of a layer before

    def products(self, width: int) -> list[tuple[int, int]]:
        return [(self.router, width)] if self.router else []

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add scaling, norm, and for the router down with its bias and earlier_scale."""
        block = plan.block(param_prefix, tensor_prefix)
        width = plan.width
        for part in (
            "hidden_states_scale",
            "hidden_states_bias",
            "residual_scale",
            "residual_bias",
        ):
            block.add(part, (width,), f"{self.module}.{part}", fp32=True)
        if self.norm:
            block.add("norm", (width,), self.norm)
        if self.router:
            block.add("down", (self.router, width), "mlp.gate.down_proj.weight")
            block.add("down_bias", (self.router,), "mlp.gate.down_proj.bias")
            if not self.is_first_router:
                name = "mlp.gate.router_states_scale"
                block.add("earlier_scale", (self.router,), name, fp32=True)
