"""The short convolution layer: projection, gate, convolution, gate, output projection.

Shapes: T tokens (including padding), D model width, C channels of this rank, K kernel size of the
convolution.
"""

from typing import Any

from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.linear import FP32, gathered_bytes
from moeserve.blocks.recurrent_layer import RecurrentLayer
from moeserve.blocks.short_conv import ShortConv
from moeserve.ops.inputs import LayerCache, RowContext
from moeserve.ops.rules import TILE


class ShortConvLayer(RecurrentLayer):
    """The short convolution of this rank's channels.

    Tensor-parallel ranks gather all channels before the output projection.
    """

    def __init__(self, spec: ShortConv, build: Builder, name: str, group: int) -> None:
        super().__init__(build, name, group)
        self.inputs = build.linear(name + "in")  # D -> input gates, output gates, inputs
        self.conv_CK = build.fp32(name + "conv")[:, 0]
        self.bias_C = build.fp32(name + "conv_bias") if spec.bias else None

    def __call__(self, x_TD: Tensor, step: Any, cache: LayerCache, context: RowContext) -> Tensor:
        """Return the layer's output [T, D]. Writes the convolution's inputs to `cache`."""
        in_gate_TC, out_gate_TC, x_TC = self.inputs(x_TD, context).float().chunk(3, 1)
        gated_TC = in_gate_TC * x_TC
        y_TC = self.ops.causal_conv(gated_TC, self.conv_CK, self.bias_C, False, cache, step)
        return self.project_back((out_gate_TC * y_TC).to(x_TD.dtype), context)

    @staticmethod
    def workspace(
        spec: ShortConv, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        local = spec.channels // tp_size
        # The product `in` (two gates and the inputs), and the rounded result.
        num_bytes = tokens * local * 4 * itemsize
        # In fp32: gates and inputs, gated inputs, the convolution's results, gated results.
        num_bytes += tokens * local * 6 * FP32
        # Inside of the convolution: four copies of a tile with the inputs before it.
        num_bytes += 4 * (TILE + spec.conv) * local * FP32
        return num_bytes + gathered_bytes(tokens, spec.channels + width, itemsize, tp_size)
