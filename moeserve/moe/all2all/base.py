"""The seam between the MoE layer and a transport: capabilities, receipts, split-phase results, layouts.

T tokens of this rank, K experts per token, D model width, e experts on this rank, P rows received for them,
C capacity of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeserve.moe.routing import Routing

if TYPE_CHECKING:
    from moeserve.moe.lane import Lane

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Layout(Enum):
    """GROUPED: rows [P, D] sorted by local expert. SLOTTED: [e, C, D], expert i's rows first in slot i."""

    GROUPED = "grouped"
    SLOTTED = "slotted"


@dataclass(frozen=True, slots=True)
class All2AllCaps:
    """What a backend can do; `plan_moe` compares it with kernels and model once at start. None: no limit."""

    name: str
    layouts: frozenset[Layout]
    wires: frozenset[str]  # dtypes that travel, e.g. "bfloat16"
    max_tokens: int | None = None
    max_hidden: int | None = None
    world_sizes: Callable[[int], bool] = lambda size: size >= 1
    max_in_flight: int | None = None
    graph_safe: bool = False


@dataclass(frozen=True, slots=True)
class Inbound:
    """What the experts consume. Rows of one expert keep the order (source rank, token, k).

    x: GROUPED [P', D] with P' >= P (rows beyond the last end hold anything finite), SLOTTED [e, C, D].
    counts_e: valid rows of each local expert, int64 on the host. ends_e: inclusive prefix ends, the same for GROUPED.
    """

    layout: Layout
    x: Tensor
    counts_e: NDArray[np.int64]
    ends_e: NDArray[np.int64]


@dataclass(slots=True)
class Ticket:
    """The single-use receipt of one dispatch. `private` belongs to the backend that issued it."""

    inbound: Inbound
    routing: Routing
    private: Any = None
    _used: bool = field(default=False, repr=False)

    def use(self) -> None:
        """Called by combine. Raises RuntimeError when this dispatch was already combined."""
        if self._used:
            raise RuntimeError("this ticket was combined already; dispatch again to get a new one")
        self._used = True


class Pending(Protocol[T_co]):
    """A split-phase result."""

    def arrive(self) -> None:
        """Launch the receive side early; optional, cheap, any number of times, from any lane."""

    def wait(self, deadline_s: float | None = None) -> T_co:
        """The result, once. Raises TimeoutError naming the ranks that are missing after `deadline_s` seconds."""
        ...


class Done(Generic[T]):
    """A result that needed no communication."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def arrive(self) -> None:
        pass

    def wait(self, deadline_s: float | None = None) -> T:
        return self._value


class All2All(Protocol):
    """One per transport; all state of a call lives in its Ticket."""

    @property
    def caps(self) -> All2AllCaps: ...

    def dispatch(self, x_TD: Tensor, routing: Routing, lane: Lane) -> Pending[Ticket]:
        """Send every row to the owners of its experts. x is not kept beyond `wait`."""
        ...

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, lane: Lane) -> Pending[Tensor]:
        """Bring results (laid out as the inbound rows) home and write the weighted sums to out_TD.

        The owner sums in order k = 0..K-1 in fp32 and rounds once; rows without experts become zero.
        """
        ...
