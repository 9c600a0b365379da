"""The specification of a short convolution of the output of the block before (Inkling).

x becomes x + conv(x), or that of the scaled output, before it is added to the residual stream.

Shapes: D model width, K kernel size of the convolution.

Source: huggingface.co/thinkingmachines/Inkling.
"""

from dataclasses import dataclass

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, conv_cache
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConv(RecurrentMixer):
    """D channels, each convolved over its last K inputs. Each rank has all channels."""

    tp_units = "channels", "channels"
    channels: int  # D
    conv: int  # K
    name: str  # of the convolution's tensor in the checkpoint
    factor: float = 1.0  # of the output
    scale: str = ""  # name of a learned factor of the input in the checkpoint; "": none

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolution's inputs."""
        return conv_cache(self.channels, self.conv)

    def products(self, width: int) -> list[tuple[int, int]]:
        return []

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add conv, and scale if there is one."""
        block = plan.block(param_prefix, tensor_prefix)
        block.add("conv", (self.channels, 1, self.conv), self.name, fp32=True)
        if self.scale:
            block.add("conv_scale", (1,), self.scale, fp32=True)
