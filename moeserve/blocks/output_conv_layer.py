"""The layer of `OutputConv`. T tokens (including padding), D model width, K kernel size."""

from functools import partial
from typing import Any

from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.linear import FP32
from moeserve.blocks.mixer import Prepare
from moeserve.blocks.output_conv import OutputConv
from moeserve.blocks.recurrent_layer import PrepareTiles
from moeserve.blocks.relative_attention_layer import with_conv
from moeserve.ops.inputs import LayerCache, RowContext
from moeserve.ops.rules import TILE


class OutputConvLayer:
    """The convolution of a block's output, on each rank."""

    def __init__(self, spec: OutputConv, build: Builder, name: str, group: int) -> None:
        self.ops = build.ops
        self.factor = spec.factor
        self.conv_DK = build.fp32(name + "conv")[:, 0]
        self.scale_1 = build.fp32(name + "conv_scale") if spec.scale else None
        self.prepare: Prepare = build.shared(
            ("tiles", group), partial(PrepareTiles, build.ops, group)
        )

    def __call__(self, x_TD: Tensor, step: Any, cache: LayerCache, context: RowContext) -> Tensor:
        """Return the layer's output [T, D]. Writes the convolution's inputs to `cache`."""
        if self.scale_1 is not None:
            x_TD = (x_TD * self.scale_1).to(x_TD.dtype)
        return with_conv(self.ops, x_TD, self.conv_DK, cache, step, self.factor)

    @staticmethod
    def workspace(
        spec: OutputConv, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        # In fp32: the scaled input, the convolution's inputs and results, and their sum.
        num_bytes = tokens * width * (4 * FP32 + itemsize)
        # Inside of the convolution: four copies of a tile with the inputs before it.
        return num_bytes + 4 * (TILE + spec.conv) * width * FP32
