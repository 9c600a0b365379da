"""The specification of Mamba with Jamba's norms: a convolution, then a selective scan.

Shapes: D model width, C channels, N state size of a channel, R rank of the time steps, K kernel
size of the convolution.

Source: Mamba (arXiv 2312.00752), Jamba (2403.19887).
"""

from dataclasses import dataclass

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, conv_cache
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1(RecurrentMixer):
    """C channels with a state [N] each."""

    tp_units = "channels", "channels"
    channels: int  # C
    state: int  # N
    rank: int  # R
    conv: int  # K
    conv_bias: bool = True
    bias: bool = False  # whether the products `in` and `out` have biases

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolution's inputs, then the state, x, dt and B of
        ops/selective_scan.py.
        """
        local = self.channels // tp_size
        return (
            *conv_cache(local, self.conv),
            CacheTensor("state", self.state, local, per_tile=True),
            CacheTensor("x", 1, local),
            CacheTensor("dt", 1, local),
            CacheTensor("b", 1, self.state),
        )

    def products(self, width: int) -> list[tuple[int, int]]:
        channels = self.channels
        selected = self.rank + 2 * self.state
        return [
            (2 * channels, width),
            (selected, channels),
            (channels, self.rank),
            (width, channels),
        ]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add in, conv, select, dt, their biases, decay, skip, norms of dt, B and C, and out."""
        block = plan.block(param_prefix, tensor_prefix, "mamba.")
        channels = self.channels
        block.stack("in", [block.share("in_proj.weight", channels)] * 2, plan.width)
        block.add("conv", (channels, 1, self.conv), "conv1d.weight", sharded=True, fp32=True)
        block.add("select", (self.rank + 2 * self.state, channels), "x_proj.weight")
        block.add("dt", (channels, self.rank), "dt_proj.weight", sharded=True)
        block.add("dt_shift", (channels,), "dt_proj.bias", sharded=True, fp32=True)
        block.add("decay", (channels, self.state), self.decay_tensor, sharded=True, fp32=True)
        block.add("skip", (channels,), "D", sharded=True, fp32=True)
        for name, size in (("dt", self.rank), ("b", self.state), ("c", self.state)):
            block.add(f"{name}_norm", (size,), f"{name}_layernorm.weight")
        if self.conv_bias:
            block.add("conv_bias", (channels,), "conv1d.bias", sharded=True, fp32=True)
        block.add("out", (plan.width, channels), "out_proj.weight", sharded=True)
        if self.bias:
            block.stack("in_bias", [block.share("in_proj.bias", channels)] * 2)
            block.add("out_bias", (plan.width,), "out_proj.bias", sharded=True)
