"""The seam between the MoE layer and a transport: capabilities, receipts, split-phase results, layouts.

T tokens of this rank, K experts per token, D model width, e experts on this rank, P rows received for them,
C capacity of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.moe.routing import Routing

if TYPE_CHECKING:
    from moeserve.moe.ubatch import UBatch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Layout(Enum):
    """GROUPED: rows [P, D] sorted by local expert. SLOTTED: [e, C, D], expert i's rows first in slot i."""

    GROUPED = "grouped"
    SLOTTED = "slotted"


@dataclass(frozen=True, slots=True)
class All2AllCaps:
    """What a backend can do; `plan_moe` compares it with kernels and model once at start. None: no limit.

    max_tokens: of one dispatch on one rank, the same on all ranks from `join` on (which may change it); a larger step
    goes in several rounds. copies: how many times received rows are in memory at once, results included. pad_hidden:
    the width that rows are filled up to, None where they are too wide. exact: it keeps the order of rows and sums that
    `Inbound` and `combine` promise, so bits do not depend on where experts are. device_counts: counts of rows stay on
    the device, see `Inbound`. in_place: rows stay on this rank as they are, so an expert kernel may sort and sum them
    itself (`Fusible`). obstacle: why it cannot serve here.
    """

    name: str
    layouts: frozenset[Layout]
    wires: frozenset[str]  # dtypes that travel, e.g. "bfloat16"
    max_tokens: int | None = None
    copies: int = 3
    max_hidden: int | None = None
    pad_hidden: Callable[[int], int | None] = lambda width: width
    world_sizes: Callable[[int], bool] = lambda size: size >= 1
    max_in_flight: int | None = None
    graph_safe: bool = False
    device_counts: bool = False
    in_place: bool = False
    exact: bool = True
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class Inbound:
    """What the experts consume. Rows of one expert keep the order (source rank, token, k).

    x: GROUPED [P', D] with P' >= P (rows beyond the last end hold anything finite), SLOTTED [e, C, D].
    counts_e: valid rows of each local expert, int64 on the host, or int32 on the device where the host is not to wait
    for them. ends_e: inclusive prefix ends, the same for GROUPED. expected: for counts on the device, how many rows P
    would be if all experts got as many.
    """

    layout: Layout
    x: Tensor
    counts_e: NDArray[np.int64] | Tensor
    ends_e: NDArray[np.int64] | Tensor
    expected: int = 0

    @property
    def host_counts_e(self) -> NDArray[np.int64]:
        """For kernels that must know them; waits for the device if that has them."""
        counts_e = self.counts_e
        return counts_e.cpu().numpy().astype(np.int64) if isinstance(counts_e, Tensor) else counts_e

    def split(self, num_experts: int) -> tuple[Inbound, Inbound]:
        """Returns the rows of the first local experts and those of the others, GROUPED. Both name all local experts,
        some of them without rows."""
        assert self.layout is Layout.GROUPED
        first_e, rest_e = self.host_counts_e.copy(), self.host_counts_e.copy()
        first_e[num_experts:] = rest_e[:num_experts] = 0
        rows = int(first_e.sum())
        return (
            Inbound(self.layout, self.x, first_e, first_e.cumsum()),
            Inbound(self.layout, self.x[rows:], rest_e, rest_e.cumsum()),
        )


@dataclass(frozen=True, slots=True)
class Early:
    """Permission to send the first `num_experts` local experts' results while the others are computed: `send(y)`, at
    most once. Results that were not sent early go with `combine`."""

    num_experts: int
    send: Callable[[Tensor], None]


@dataclass(slots=True)
class Ticket:
    """The single-use receipt of one dispatch. `private` belongs to the backend that issued it.

    y: where the experts should write their results, laid out as inbound.x; None: anywhere. A backend that owns the
    memory saves a copy that way, but must take any tensor in `combine`.
    """

    inbound: Inbound
    routing: Routing
    private: Any = None
    y: Tensor | None = None
    early: Early | None = None
    _used: bool = field(default=False, repr=False)

    def use(self) -> None:
        """Called by combine. Raises RuntimeError when this dispatch was already combined."""
        if self._used:
            raise RuntimeError("this ticket was combined already; dispatch again to get a new one")
        self._used = True


class Pending(Protocol[T_co]):
    """A split-phase result."""

    @property
    def arrived_ns(self) -> int:
        """After `wait`: the monotonic time at which the last row was here; 0 when nothing travelled or nobody knows,
        `ON_DEVICE` (comm/gloo.py) when `wait` has only told the device to wait."""
        ...

    def arrive(self) -> None:
        """Called by the other micro-batch before it sends: launch the receive side early. Optional, any number of
        times."""

    def wait(self, deadline_s: float | None = None) -> T_co:
        """The result, once. Raises PeerLost naming the ranks that are missing: at once when they are gone, after
        `deadline_s` seconds (default: the members' own) when they are silent.

        Of a backend that is `Checked` it only makes the current stream wait, under the members' deadline."""
        ...


class Completed(Generic[T]):
    """A result that needed no communication."""

    __slots__ = ("_value",)
    arrived_ns = 0

    def __init__(self, value: T) -> None:
        self._value = value

    def arrive(self) -> None:
        pass

    def wait(self, deadline_s: float | None = None) -> T:
        return self._value


@runtime_checkable
class Checked(Protocol):
    """Whose transfers nobody waits for on the host, so that errors may come to light later."""

    def check(self) -> None:
        """To be called when the host has waited for what was computed from transfers, before it is used: raises
        PeerLost if one of them came to nothing."""
        ...


class All2All(Protocol):
    """One per transport; all state of a call lives in its Ticket.

    Between `join` and `leave` every rank must make the same calls in the same order on each micro-batch. Micro-batches
    have channels
    of their own and are used by one thread each. Routing ids are physical slots: slot s belongs to rank
    s // experts_per_rank and is its local slot s % experts_per_rank.
    """

    @property
    def caps(self) -> All2AllCaps: ...

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        """Connects to all members, one channel per micro-batch. Blocks; raises PeerLost naming those that did not
        come."""
        ...

    def leave(self) -> None:
        """Drops all connections, at any time and from any thread: whoever waits, here or at a peer, gets PeerLost."""
        ...

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Pending[Ticket]:
        """Send every row to the owners of its experts. x is not kept beyond `wait`."""
        ...

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch) -> Pending[Tensor]:
        """Bring results (laid out as the inbound rows) home and write the weighted sums to out_TD.

        The owner sums in order k = 0..K-1 in fp32 and rounds once; rows without experts become zero. y is free again
        (for the next dispatch of this micro-batch) when `wait` has returned.
        """
        ...


class Absent:
    """Stands for a backend that cannot serve, so that the plan can show the reason. Nothing but `caps` is ever used."""

    def __init__(self, name: str, why: str) -> None:
        self.caps = All2AllCaps(name=name, layouts=frozenset(), wires=frozenset(), obstacle=why)

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError(self.caps.obstacle)

    join = leave = dispatch = combine = _refuse
