"""The seam between the MoE layer and a transport: capabilities, receipts, split-phase results,
layouts.

T tokens of this rank, K experts per token, D model width, e local experts (those of this rank), P
rows received for them, C rows that one expert has room for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.moe.all2all.wire_format import BLOCK
from moeserve.moe.pending import Pending
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch


class Layout(Enum):
    """The arrangement of received rows in memory. GROUPED: [P, D], sorted by local expert. SLOTTED:
    [e, C, D], each expert's rows first in its part."""

    GROUPED = "grouped"
    SLOTTED = "slotted"


@dataclass(frozen=True, slots=True)
class All2AllCaps:
    """Capabilities of a backend. `plan_moe` compares them with kernels and model once at start."""

    name: str
    layouts: frozenset[Layout]
    wires: frozenset[str]  # dtypes that travel, e.g. "bfloat16"
    # Tokens of one dispatch on one rank, the same on all ranks; None: no limit. A larger step goes
    # in several rounds. `join` may change it.
    max_tokens: int | None = None
    copies: int = 3  # of received rows in memory at once, results included
    # The width that rows are filled up to; None where they are too wide.
    pad_hidden: Callable[[int], int | None] = lambda width: width
    world_sizes: Callable[[int], bool] = lambda size: size >= 1
    max_in_flight: int | None = None
    # Why no CUDA graph can record a dispatch; None if one can.
    not_recorded: str | None = "rows are counted on the host"
    # Most tokens of each rank in a recorded dispatch; None: no limit. `join` may change it.
    most_recorded: int | None = None
    recorded_rows: int = 0  # that a recorded dispatch may bring to memory of the graph's own
    device_counts: bool = False  # counts of rows must stay on the device, see `Inbound`
    # Rows stay on this rank as they are, so a kernel may sort and sum them itself (`Fusible`).
    in_place: bool = False
    # Rows and sums have the order that `Inbound` and `combine` promise, so bits do not depend on
    # the ranks that have the experts.
    exact: bool = True
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    encrypts: bool = False  # rows between machines can be encrypted
    obstacle: str | None = None  # why the backend is unavailable here


@dataclass(frozen=True, slots=True)
class Inbound:
    """The rows that the experts compute on.

    Rows of one expert keep the order (source rank, token, k).
    """

    layout: Layout
    # GROUPED [P', D] with P' >= P (rows behind the last end hold anything finite), SLOTTED
    # [e, C, D] (anything behind the counts).
    rows: Tensor
    # Valid rows of each local expert: int64 on the host, or int32 on the device where the host need
    # not wait for them.
    counts_e: NDArray[np.int64] | Tensor
    # The ends of the experts' rows. GROUPED: inclusive prefix sums of counts_e. SLOTTED: counts_e.
    ends_e: NDArray[np.int64] | Tensor
    expected: int = 0  # for counts on the device: P with an even load; 0: all rows
    most: int = 0  # for counts on the device: P at most; 0: all rows
    # fp32 [..., D / 128] of any strides: rows are e4m3 as they travelled, with a scale for each 128
    # elements. A kernel that multiplies such rows reads both; any other reads `x`. No exact backend
    # leaves rows so.
    scales: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """The rows as the model has them, which were bfloat16 if they travelled with scales. In
        slots those beyond the counts stay undefined, and the host waits for nothing."""
        if self.scales is None:
            return self.rows
        if self.layout is Layout.GROUPED:
            scales_PD = self.scales.repeat_interleave(BLOCK, 1)[:, : self.rows.shape[1]]
            return (self.rows.float() * scales_PD).to(torch.bfloat16)
        from moeserve.kernels.fp8 import widen  # torch for CUDA brings Triton

        assert isinstance(self.counts_e, Tensor)
        x_eCD = self.rows.new_empty(self.rows.shape, dtype=torch.bfloat16)
        return widen(self.rows, self.scales, self.counts_e, x_eCD)

    @property
    def host_counts_e(self) -> NDArray[np.int64]:
        """The counts for kernels that need them on the host; waits for the device if they are
        there.
        """
        counts_e = self.counts_e
        return counts_e.cpu().numpy().astype(np.int64) if isinstance(counts_e, Tensor) else counts_e

    def split(self, num_experts: int) -> "tuple[Inbound, Inbound]":
        """Return the rows of the first local experts and those of the others, GROUPED. Both name
        all local experts, some of them without rows."""
        assert self.layout is Layout.GROUPED
        assert self.scales is None
        first_e = self.host_counts_e.copy()
        rest_e = self.host_counts_e.copy()
        first_e[num_experts:] = rest_e[:num_experts] = 0
        rows = int(first_e.sum())
        return (
            Inbound(self.layout, self.rows, first_e, first_e.cumsum()),
            Inbound(self.layout, self.rows[rows:], rest_e, rest_e.cumsum()),
        )


@dataclass(frozen=True, slots=True)
class Early:
    """Permission to send the first `num_experts` local experts' results while the others are
    computed: `send(y)`, at most once. Results that were not sent early go with `combine`."""

    num_experts: int
    send: Callable[[Tensor], None]


@dataclass(slots=True)
class Ticket:
    """The single-use receipt of one dispatch. `private` belongs to the backend that issued it.

    y: where the experts should write their results, laid out as inbound.rows, to save the backend a
    copy; None: anywhere. `combine` takes any tensor all the same.
    """

    inbound: Inbound
    routing: Routing
    private: Any = None
    y: Tensor | None = None
    early: Early | None = None
    _used: bool = field(default=False, repr=False)

    def use(self) -> None:
        """Mark the ticket as used, in `combine`. Raises RuntimeError when this dispatch was
        combined already.
        """
        if self._used:
            raise RuntimeError("this ticket was combined already; dispatch again to get a new one")
        self._used = True


@runtime_checkable
class Checked(Protocol):
    """A backend whose transfers the host does not wait for: their errors show later."""

    def check(self) -> None:
        """Raises PeerLost if a transfer has failed. To be called when the host has waited for the
        device, before it uses what was computed from transfers."""


class All2All(Protocol):
    """A transport of rows between ranks. All state of a call lives in its Ticket.

    Between `join` and `leave` every rank must make the same calls in the same order on each
    micro-batch. Micro-batches have channels of their own and are used by one thread each. Routing
    ids are physical experts: physical expert p is local expert p % experts_per_rank of rank p //
    experts_per_rank.
    """

    caps: All2AllCaps

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        """Connect to all members, one channel per micro-batch. Blocks. Raises PeerLost naming the
        ranks that did not come."""

    def leave(self) -> None:
        """Drop all connections, at any time and from any thread; all waits, here and at peers,
        raise PeerLost.
        """

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Pending[Ticket]:
        """Send every row to the ranks that have its experts. x is not kept beyond `wait`."""

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch) -> Pending[Tensor]:
        """Send results (laid out as the inbound rows) home and writes the weighted sums to out_TD.

        A token's rank sums in order k = 0..K-1 in fp32 and rounds once; rows without experts become
        zero. y is free again, for the next dispatch of this micro-batch, when `wait` has returned.
        """


class UnavailableBackend:
    """Stands for a backend that cannot serve, so that the plan can show the reason. Nothing but
    `caps` is ever used.
    """

    def __init__(self, name: str, why: str) -> None:
        self.caps = All2AllCaps(name=name, layouts=frozenset(), wires=frozenset(), obstacle=why)

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError(self.caps.obstacle)

    join = leave = dispatch = combine = _refuse
