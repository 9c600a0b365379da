"""The specification of a connection: how a block reads the residual streams and adds its output.

Most families have one residual stream. A block reads its norm, and its output is added to it: see
the norms of `LayerSpec`. Families with several residual streams give each block a connection.

Source: hyper-connections (arXiv 2409.19606).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualConnection(ABC):
    """The specification of a connection. `blocks/kinds.py` has the class that computes it.

    Connections are not sharded: each rank has their parameters.
    """

    @abstractmethod
    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add the connection's parameters to a plan.

        param_prefix: the prefix of the parameters' names.
        tensor_prefix: the prefix of the names of the layer's tensors in the checkpoint.
        """

    def products(self, width: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of every matrix product.

        width: the width of the model.
        """
        return []

    def workspace(self, width: int, tokens: int, itemsize: int) -> int:
        """Return an upper bound of the bytes that `read` and `write` need beside the streams.

        width: the width of the model.
        tokens: the number of tokens of a step, including padding.
        itemsize: bytes of an element.
        """
        return 0
