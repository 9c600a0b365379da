"""The MoE layer: route, dispatch, experts, combine; a shared expert runs while rows travel.

Under tensor parallelism all ranks of an engine route all of its tokens, and each sends off an equal share.

T tokens, D model width, P received rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeserve.comm.tensor import ALONE, TensorParallel, share
from moeserve.moe.all2all.base import All2All, Ticket
from moeserve.moe.experts.base import Experts
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.routing import Router, Routing
from moeserve.moe.ubatch import Load, UBatch

Block = Callable[..., tuple[Tensor, Load]]  # x_TD, packed (and num_tokens, if a tensor) -> result, rows per expert


class MoELayer:
    """One layer's experts behind one backend and one kernel. `shared` maps x_TD to what is added to every token.
    `block`, if given, does what router, this backend and kernel do together, in one call: its rows stay on this rank.

    `all2all`, `packed` (the local slots' weights in the kernel's layout) and `slots` are replaced between steps when
    experts move or the group changes.
    """

    def __init__(
        self,
        router: Router,
        all2all: All2All,
        experts: Experts,
        packed: Any,
        slots: LogicalToPhysical,
        shared: Callable[[Tensor], Tensor] | None = None,
        tp: TensorParallel = ALONE,
        block: Block | None = None,
    ) -> None:
        self.all2all = all2all
        self.experts = experts
        self.packed = packed
        self.slots = slots
        self._router = router
        self._shared = shared
        self._tp = tp
        self._block, self._home = block, all2all

    @property
    def stays(self) -> bool:
        """Whether no row leaves this rank, and one call does all."""
        return self._block is not None and self.all2all is self._home

    @property
    def recordable(self) -> bool:
        """Whether a call never asks the device, so that it can be recorded and replayed."""
        return self.stays or (self.all2all.caps.graph_safe and self.slots.counts_on_device)

    def __call__(self, x_TD: Tensor, num_tokens: int | Tensor, ubatch: UBatch) -> Tensor:
        """Rows from `num_tokens` on are padding: they reach no expert. A tensor, int32 [1], where it is recordable."""
        on_device = (num_tokens,) if isinstance(num_tokens, Tensor) else ()
        if self._block is not None and self.stays and (on_device or 0 < num_tokens == x_TD.shape[0]):
            block, packed = self._block, self.packed
            out_TD = ubatch.stay(lambda: block(x_TD, packed, *on_device))
            return out_TD if self._shared is None else out_TD + self._shared(x_TD)
        routing = self._router(x_TD, num_tokens)
        ubatch.note_load(self.slots.load(routing))
        routing = self.slots(routing)
        tp = self._tp
        if tp.size == 1:
            return self._compute(x_TD, routing, len(x_TD) if on_device else int(num_tokens), ubatch)
        assert isinstance(num_tokens, int), num_tokens
        shares = [share(num_tokens, tp.size, rank) for rank in range(tp.size)]
        counts = [part.stop - part.start for part in shares]
        mine = shares[tp.rank]
        part_TD = self._compute(x_TD[mine], _rows(routing, mine), counts[tp.rank], ubatch)
        out_TD = tp.gather_rows(part_TD, counts, ubatch.index)
        return torch.nn.functional.pad(out_TD, (0, 0, 0, x_TD.shape[0] - num_tokens))

    def _compute(self, x_TD: Tensor, routing: Routing, num_tokens: int, ubatch: UBatch) -> Tensor:
        """What the experts, and the shared one, make of x: in as many rounds as the rank with most tokens needs."""
        out_TD = torch.empty_like(x_TD)
        shared = _Later(self._shared, x_TD)
        limit = self.all2all.caps.max_tokens
        if limit is None:
            self._round(x_TD, routing, out_TD, ubatch, shared)
        else:
            for start in range(0, max(1, ubatch.most_tokens, num_tokens), limit):
                part = slice(start, start + limit)
                self._round(x_TD[part], _rows(routing, part), out_TD[part], ubatch, shared)
        return out_TD if shared.value is None else out_TD + shared.value

    def serve(self, like_D: Tensor, ubatch: UBatch) -> None:
        """Computes for the other ranks in a step in which this one has no tokens. like_D: a row's shape and dtype."""
        nothing = like_D.new_empty((0, like_D.shape[-1]))
        self(nothing, 0, ubatch)

    def _round(self, x_TD: Tensor, routing: Routing, out_TD: Tensor, ubatch: UBatch, shared: _Later) -> None:
        ticket = ubatch.overlap(lambda: self.all2all.dispatch(x_TD, routing, ubatch), name="dispatch")
        y = torch.empty_like(ticket.inbound.x) if ticket.y is None else ticket.y
        self._run_experts(ticket, y, ubatch)
        ubatch.overlap(
            lambda: self.all2all.combine(ticket, y, out_TD, ubatch), shared if shared.waits else None, "combine"
        )

    def _run_experts(self, ticket: Ticket, y: Tensor, ubatch: UBatch) -> None:
        if (early := ticket.early) is None:
            self.experts.run(ticket.inbound, self.packed, y, ubatch.scratch)
            return
        first, rest = ticket.inbound.split(early.slots)
        self.experts.run(first, self.packed, y, ubatch.scratch)
        ubatch.send_early(lambda: early.send(y))
        self.experts.run(rest, self.packed, y[int(first.ends_e[-1]) :], ubatch.scratch)


def _rows(routing: Routing, rows: slice) -> Routing:
    return Routing(routing.ids_TK[rows], routing.weights_TK[rows])


class _Later:
    """Runs the shared expert when told to, once, and keeps what it returned."""

    __slots__ = ("_run", "_x", "value")

    def __init__(self, run: Callable[[Tensor], Tensor] | None, x_TD: Tensor) -> None:
        self._run = run
        self._x = x_TD
        self.value: Tensor | None = None

    @property
    def waits(self) -> bool:
        return self._run is not None and self.value is None and self._x.shape[0] > 0

    def __call__(self) -> None:
        if self._run is not None:
            self.value = self._run(self._x)
