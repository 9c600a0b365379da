"""The Mamba layer: projection, convolution, selection, scan, gate, output projection.

Shapes: T tokens (including padding), D model width, C channels of this rank, N state size of a
channel, R rank of the time steps, K kernel size of the convolution.
"""

from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.linear import FP32, gather_unpadded, gathered_bytes
from moeserve.blocks.mamba1 import Mamba1
from moeserve.blocks.recurrent_layer import RecurrentLayer, decay_factors
from moeserve.ops.inputs import LayerCache, RowContext
from moeserve.ops.rules import SWIGLU, TILE


class Mamba1Layer(RecurrentLayer):
    """Mamba of this rank's channels.

    Tensor-parallel ranks gather all channels before `select` and before the output projection.
    """

    def __init__(self, spec: Mamba1, build: Builder, name: str, group: int) -> None:
        super().__init__(build, name, group)
        self.spec = spec
        self.inputs = build.linear(name + "in")  # D -> inputs of the convolution, output gates
        self.select = build.linear(name + "select")  # channels of all ranks -> time steps, B, C
        self.dt = build.linear(name + "dt")  # R -> C
        self.conv_CK = build.fp32(name + "conv")[:, 0]
        self.conv_bias_C = build.fp32(name + "conv_bias") if spec.conv_bias else None
        self.dt_shift_C = build.fp32(name + "dt_shift")
        self.a_NC = build.fp32(
            name + "decay", lambda x: decay_factors(x.T.contiguous(), spec.decay_tensor)
        )
        self.skip_C = build.fp32(name + "skip")
        self.norms = [build.norm(f"{name}{part}_norm") for part in ("dt", "b", "c")]

    def __call__(self, x_TD: Tensor, step: Any, cache: LayerCache, context: RowContext) -> Tensor:
        """Return the layer's output [T, D]. Writes the tokens' inputs and states to `cache`."""
        spec = self.spec
        ops = self.ops
        dtype = x_TD.dtype
        inputs, gates = self.inputs(x_TD, context).chunk(2, 1)
        x_TC = ops.causal_conv(inputs, self.conv_CK, self.conv_bias_C, True, cache[:2], step)
        all_channels = gather_unpadded(x_TC.to(dtype), spec.channels, self.tp, context.channel)
        selected = self.select(all_channels, context)
        ends = spec.rank, spec.rank + spec.state
        steps_TR, b_TN, c_TN = (
            ops.rms_norm(part.float().contiguous(), weight, self.eps)
            for part, weight in zip(selected.tensor_split(ends, 1), self.norms, strict=True)
        )
        dt_TC = ops.softplus(self.dt(steps_TR.to(dtype), context).float() + self.dt_shift_C)
        y_TC = ops.selective_scan(x_TC, dt_TC, self.a_NC, b_TN, c_TN, self.skip_C, cache[2:], step)
        gated = ops.act_mul(torch.cat((gates.float(), y_TC), 1), SWIGLU).to(dtype)
        return self.project_back(gated, context)

    @staticmethod
    def workspace(
        spec: Mamba1, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        local = spec.channels // tp_size
        selected = spec.rank + 2 * spec.state
        # The product `in` (inputs and gates), rounded convolved inputs, time steps, and the result.
        num_bytes = tokens * local * 5 * itemsize
        # In fp32: the convolution, time steps, the scan, gates and results, with temporaries.
        num_bytes += tokens * local * 12 * FP32
        # The convolved channels of all ranks.
        num_bytes += tokens * spec.channels * itemsize
        # Low-rank time steps, B and C: the product, their parts and their norms.
        num_bytes += tokens * selected * 3 * (itemsize + FP32)
        # Inside of the convolution: four copies of a tile with the inputs before it.
        states = 4 * (TILE + spec.conv) * local * FP32
        # Inside of the scan: four copies of the states of a tile's tokens, and two single states.
        states += (4 * TILE + 2) * spec.state * local * FP32
        gathered = gathered_bytes(tokens, 2 * spec.channels + width, itemsize, tp_size)
        return num_bytes + states + gathered
