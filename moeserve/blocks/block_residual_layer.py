"""The connection `BlockResidual`.

Shapes: T tokens (including padding), D model width, N streams, O results.
"""

import torch
from torch import Tensor

from moeserve.blocks.block_residual import BlockResidual
from moeserve.blocks.build import Builder
from moeserve.blocks.norm import Norm
from moeserve.blocks.residual_layer import Residual
from moeserve.ops.elementwise import LANES, exp
from moeserve.ops.inputs import RowContext

EPS = 1e-6  # epsilon of the norms of streams


class BlockResidualLayer:
    """The connection of one block with the streams."""

    def __init__(self, spec: BlockResidual, build: Builder, name: str) -> None:
        self._spec = spec
        self._ops = build.ops
        self._width = build.width
        self._ones_D = torch.ones(build.width, device=build.ops.device)
        self._norms = [
            Norm(build.ops, build.eps, build.norm(f"{name}norm_{i}"))
            for i in range(len(spec.norms))
        ]
        if spec.query:
            # Padded, so that bits do not depend on the batch; see `pack_gate`
            self._query = build.slots.load(
                (name + "query",),
                lambda ops, query: ops.pack_linear(
                    torch.nn.functional.pad(
                        query.float().view(spec.outputs, -1), (0, 0, 0, LANES - spec.outputs)
                    ),
                    None,
                ),
            )

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the block's input, and the streams."""
        streams_TC, held = residual
        if self._spec.takes:
            return held[0], Residual(streams_TC)
        if self._spec.query:
            results = self._attend(streams_TC)
        else:
            results = [streams_TC[:, -self._width :]] * self._spec.outputs
        if self._norms:
            results = [norm(x) for norm, x in zip(self._norms, results, strict=True)]
        x_TC = results[0] if len(results) == 1 else torch.cat(results, 1)
        return x_TC, Residual(streams_TC)

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Hold the block's output, or add it to the current stream, or begin a new one with it."""
        streams_TC = residual.streams_TC
        if self._spec.holds:
            return Residual(streams_TC, (out_TD,))
        if self._spec.keeps:
            return Residual(torch.cat((streams_TC, out_TD), 1))
        current_TD = streams_TC[:, -self._width :] + out_TD
        return Residual(torch.cat((streams_TC[:, : -self._width], current_TD), 1))

    def _attend(self, streams_TC: Tensor) -> list[Tensor]:
        """Return the weighted sums of normed streams, computed in fp32 in their order."""
        rows = streams_TC.reshape(-1, self._width).float()
        normed = self._ops.rms_norm(rows, self._ones_D, EPS)
        dots = self._query(normed, RowContext(len(normed)))[:, : self._spec.outputs]
        scores_TNO = dots.view(len(streams_TC), -1, self._spec.outputs) * self._width**-0.5
        weights_TNO = exp((scores_TNO - scores_TNO.amax(1, keepdim=True)).contiguous())
        normed_TND = normed.view(len(streams_TC), -1, self._width)
        results = []
        for output in range(self._spec.outputs):
            total_T1 = torch.zeros_like(weights_TNO[:, 0, :1])
            sum_TD = torch.zeros_like(normed_TND[:, 0])
            for i in range(normed_TND.shape[1]):
                weight_T1 = weights_TNO[:, i, output, None]
                total_T1 = total_T1 + weight_T1
                sum_TD = sum_TD + weight_T1 * normed_TND[:, i]
            results.append((sum_TD / total_T1).to(streams_TC.dtype))
        return results
