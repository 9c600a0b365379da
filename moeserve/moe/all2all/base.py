"""The interface between the MoE layer and an all-to-all transport.

A step calls `dispatch`, runs the local experts on `Ticket.inbound`, and passes the ticket and the
results to `combine`. A row is one token's activation, on its way to one expert.

T: tokens of this rank. K: experts per token. D: model width. e: local experts (of this rank).
P: rows received for the local experts. C: capacity of one expert, in rows.
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
    """The arrangement of received rows in memory."""

    GROUPED = "grouped"  # [P, D], sorted by local expert
    SLOTTED = "slotted"  # [e, C, D], each expert's rows at the beginning of its C slots


@dataclass(frozen=True, slots=True)
class All2AllCaps:
    """Capabilities of a backend. `plan_moe` compares them with kernels and model once at start."""

    name: str
    layouts: frozenset[Layout]
    row_dtypes: frozenset[str]  # dtypes of the model that it accepts, e.g. "bfloat16"
    # The most tokens of one dispatch on one rank, the same on all ranks; None: no limit. A larger
    # step is dispatched in several rounds. `join` may change it.
    max_tokens: int | None = None
    # How many copies of all received rows are in memory at once. Results count as a copy.
    copies: int = 3
    # Return the width to which rows are padded; None if they are too wide.
    pad_hidden: Callable[[int], int | None] = lambda width: width
    # Return whether a group of this many ranks is supported.
    supports_world_size: Callable[[int], bool] = lambda size: size >= 1
    # How many dispatches may wait for their combine at once, however they are divided among the
    # micro-batches; None: any number.
    max_in_flight: int | None = None
    # Why no CUDA graph can record a dispatch; None if one can.
    why_not_recordable: str | None = "rows are counted on the host"
    # The most tokens of each rank in a recorded dispatch; None: no limit. `join` may change it.
    most_recorded: int | None = None
    # The most rows that a recorded dispatch receives into the graph's own memory.
    recorded_rows: int = 0
    device_counts: bool = False  # row counts stay on the device, see `Inbound.counts_e`
    # Rows are not moved or rounded, so a kernel may sort and sum them itself (`Fusible`).
    in_place: bool = False
    # Rows and sums have the order that `Inbound` and `combine` promise, so the bits of a result do
    # not depend on which rank holds an expert.
    exact: bool = True
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    encrypts: bool = False  # rows between machines can be encrypted
    obstacle: str | None = None  # why the backend is unavailable here; None if it is available


@dataclass(frozen=True, slots=True)
class Inbound:
    """The rows that the local experts compute on.

    The rows of one expert are in the order (source rank, token, k).
    """

    layout: Layout
    # GROUPED: [P', D] with P' >= P; the rows after the last end are undefined, but finite.
    # SLOTTED: [e, C, D]; the rows after each expert's count are undefined.
    rows: Tensor
    # The number of valid rows of each local expert: int64 on the host, or int32 on the device, so
    # that the host need not wait.
    counts_e: NDArray[np.int64] | Tensor
    # The end of each expert's rows. GROUPED: inclusive prefix sums of counts_e. SLOTTED: counts_e.
    ends_e: NDArray[np.int64] | Tensor
    expected_rows: int = 0  # P under an even load, if counts are on the device; 0: all rows
    max_rows: int = 0  # upper bound of P, if counts are on the device; 0: all rows
    # fp32 [..., D / 128] with any strides, one scale for each 128 elements of e4m3 `rows`. None:
    # the rows are in the model's dtype. Kernels for fp8 rows read `rows` and `scales`; other
    # kernels read `x`. Exact backends leave this None.
    scales: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """The rows in the model's dtype (bfloat16, if there are scales).

        SLOTTED rows after the counts stay undefined. The host does not wait for the device.
        """
        if self.scales is None:
            return self.rows
        if self.layout is Layout.GROUPED:
            scales_PD = self.scales.repeat_interleave(BLOCK, 1)[:, : self.rows.shape[1]]
            return (self.rows.float() * scales_PD).to(torch.bfloat16)
        from moeserve.kernels.fp8 import widen  # needs Triton, which only CUDA builds of torch have

        assert isinstance(self.counts_e, Tensor)
        x_eCD = self.rows.new_empty(self.rows.shape, dtype=torch.bfloat16)
        return widen(self.rows, self.scales, self.counts_e, x_eCD)

    @property
    def host_counts_e(self) -> NDArray[np.int64]:
        """`counts_e` on the host. Waits for the device if the counts are there."""
        counts_e = self.counts_e
        return counts_e.cpu().numpy().astype(np.int64) if isinstance(counts_e, Tensor) else counts_e

    def split(self, num_experts: int) -> "tuple[Inbound, Inbound]":
        """Split GROUPED rows into those of the first `num_experts` local experts and the rest.

        Both parts keep all local experts. In each part, the experts of the other one have a count
        of 0.
        """
        assert self.layout is Layout.GROUPED
        assert self.scales is None
        first_e = self.host_counts_e.copy()
        rest_e = self.host_counts_e.copy()
        first_e[num_experts:] = 0
        rest_e[:num_experts] = 0
        first_rows = int(first_e.sum())
        first = Inbound(self.layout, self.rows, counts_e=first_e, ends_e=first_e.cumsum())
        rest = Inbound(self.layout, self.rows[first_rows:], counts_e=rest_e, ends_e=rest_e.cumsum())
        return first, rest


@dataclass(frozen=True, slots=True)
class EarlySend:
    """The option to send the results of the first `num_experts` local experts before the others are
    computed. `combine` sends all results that were not sent early.
    """

    num_experts: int
    send: Callable[[Tensor], None]  # send(y), at most once


@dataclass(slots=True)
class Ticket:
    """The state of one dispatch, from `dispatch` to `combine`. It can be combined once."""

    inbound: Inbound
    routing: Routing
    private: Any = None  # the backend's own state
    # Where the experts should write their results, in the layout of inbound.rows; None: anywhere.
    # `combine` accepts any tensor, but has to copy one that is not this.
    y: Tensor | None = None
    early_send: EarlySend | None = None  # None: all results are sent by `combine`
    _used: bool = field(default=False, repr=False)

    def use(self) -> None:
        """Mark the ticket as used; `combine` calls this. Raises RuntimeError on a second call."""
        if self._used:
            raise RuntimeError("this ticket was combined already; dispatch again to get a new one")
        self._used = True


@runtime_checkable
class Checked(Protocol):
    """A backend whose `wait` only makes the device wait, so that its errors show later."""

    def check(self) -> None:
        """Raise PeerLost if a transfer has failed. Call this after the host has waited for the
        device and before it uses results of the step.
        """


class All2All(Protocol):
    """A transport of rows between ranks. All state of a call is in its Ticket.

    Between `join` and `leave`, every rank must make the same calls in the same order on each
    micro-batch. Each micro-batch has its own channel and is used by one thread at a time.

    Routing ids are physical experts: physical expert p is local expert p % experts_per_rank of rank
    p // experts_per_rank.
    """

    caps: All2AllCaps

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        """Connect to all members, with one channel per micro-batch. Blocks.

        Raises PeerLost, with the ranks that did not join.
        """

    def leave(self) -> None:
        """Close all connections. May be called at any time and from any thread.

        All waits, on this rank and on its peers, then raise PeerLost.
        """

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Pending[Ticket]:
        """Send every row to the ranks that hold its experts. x is not read after `wait`."""

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch) -> Pending[Tensor]:
        """Return results to the ranks of their tokens, and write the weighted sums to out_TD.

        y: the results, in the layout of the inbound rows. After `wait` it may be overwritten, by
        the next dispatch of this micro-batch. A sum is computed by the token's rank in the order
        k = 0..K-1, in fp32, and rounded once. Tokens without experts get zeros.
        """


class UnavailableBackend:
    """A placeholder for a backend that cannot run here, so that the plan can show the reason.

    Only its `caps` are used.
    """

    def __init__(self, name: str, why: str) -> None:
        self.caps = All2AllCaps(
            name=name, layouts=frozenset(), row_dtypes=frozenset(), obstacle=why
        )

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError(self.caps.obstacle)

    join = _refuse
    leave = _refuse
    dispatch = _refuse
    combine = _refuse
