"""The specification of the short convolution: a causal depthwise convolution between two gates.

Shapes: D model width, K kernel size of the convolution.

Source: LFM2 Technical Report (arXiv 2511.23404).
"""

from dataclasses import dataclass

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, conv_cache
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv(RecurrentMixer):
    """D channels, each convolved over its last K inputs (LFM2)."""

    tp_units = "channels", "channels"
    channels: int
    conv: int  # K
    bias: bool = False  # whether both products and the convolution have biases

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolution's inputs."""
        return conv_cache(self.channels // tp_size, self.conv)

    def products(self, width: int) -> list[tuple[int, int]]:
        return [(3 * self.channels, width), (width, self.channels)]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add in, conv and out with their biases."""
        block = plan.block(param_prefix, tensor_prefix, "conv.")
        channels = self.channels
        block.stack("in", [block.share("in_proj.weight", channels)] * 3, plan.width)
        block.add("conv", (channels, 1, self.conv), "conv.weight", sharded=True, fp32=True)
        block.add("out", (plan.width, channels), "out_proj.weight", sharded=True)
        if self.bias:
            block.stack("in_bias", [block.share("in_proj.bias", channels)] * 3)
            block.add("conv_bias", (channels,), "conv.bias", sharded=True, fp32=True)
            block.add("out_bias", (plan.width,), "out_proj.bias", sharded=True)
