"""The placement of a fleet's experts, their load, and the placement that is being put in force.

No other part of a fleet needs numpy: import this module late.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import numpy as np

from moeserve.cluster.view import ExpertsView, RebalanceDecision
from moeserve.messages import ExpertLoad, Placed, PlacementTable
from moeserve.moe.placement.placement import Placement
from moeserve.moe.placement.rebalance import Rebalancer

KEPT_DECISIONS = 32


class Rebalancing:
    """The experts of a fleet: L MoE layers of E experts. Belongs to the fleet's loop."""

    def __init__(self, num_layers: int, num_experts: int, num_ranks: int, redundant: int) -> None:
        self.num_placed = self.num_given_up = 0
        self._decisions: deque[RebalanceDecision] = deque(maxlen=KEPT_DECISIONS)
        self._redundant = redundant
        self._load_LE = np.zeros((num_layers, num_experts), np.int64)
        self._initial = Placement.initial(num_layers, num_experts, num_ranks, redundant)
        self._rebalancer: Rebalancer | None = None  # until the engines have said how large an expert is
        self._solving = False
        self._held_back: list[ExpertLoad] = []  # came while the solver ran
        self._outcome: asyncio.Future[str] | None = None  # of the placement that is on its way

    @property
    def placement(self) -> Placement:
        """The placement in force, as far as is known here: a Join brings all ranks to it."""
        return self._initial if self._rebalancer is None else self._rebalancer.current

    @property
    def table(self) -> PlacementTable:
        """`placement` as a message."""
        return self.placement.to_table()

    @property
    def why(self) -> str:
        """The reason of the last decision, for people."""
        return "no engine serves yet" if self._rebalancer is None else self._rebalancer.why

    @property
    def moved_bytes(self) -> int:
        """Bytes of expert weights that all ranks have fetched since the start."""
        return 0 if self._rebalancer is None else self._rebalancer.moved_bytes

    def joined(self, table: PlacementTable | None, expert_bytes: int) -> None:
        """All ranks have met with this placement and dropped the one that was being put in force."""
        if self._rebalancer is None:
            self._rebalancer = Rebalancer(self._initial, expert_bytes)
        if table is not None:
            self._rebalancer.joined(Placement.from_table(table))
        self._conclude("the group was formed anew")

    def note(self, load: ExpertLoad) -> None:
        """Adds an engine's report; drops one of another shape, as from a runner without a model."""
        counts = np.frombuffer(load.counts, "<i8")
        if counts.size != self._load_LE.size:
            return
        self._load_LE += counts.reshape(self._load_LE.shape)
        if self._solving:
            self._held_back.append(load)
        elif self._rebalancer is not None:
            self._rebalancer.note(load, time.monotonic())

    async def propose(self, *, force: bool) -> Placement | None:
        """Returns a better placement if there is one that pays (`force`: whatever it costs); solves in a thread.

        The caller puts it in force and awaits `outcome`.
        """
        rebalancer = self._rebalancer
        if rebalancer is None or self._solving:
            return None
        self._solving = True
        try:
            placement = await asyncio.to_thread(rebalancer.propose, time.monotonic(), force)
        finally:
            self._solving = False
            for load in self._held_back:
                rebalancer.note(load, time.monotonic())
            self._held_back = []
        if placement is not None:
            self._outcome = asyncio.get_running_loop().create_future()
        return placement

    def decided(self, decision: RebalanceDecision) -> None:
        """Records a decision for the view."""
        self._decisions.append(decision)
        if decision.error:
            self.num_given_up += 1
        else:
            self.num_placed += 1

    async def outcome(self) -> str:
        """Returns "" once the proposed placement is in force, otherwise why it is not."""
        assert self._outcome is not None
        return await asyncio.shield(self._outcome)

    def placed(self, msg: Placed) -> None:
        """Takes an engine's answer; the vote makes all answers alike, so the first one decides."""
        if self._rebalancer is not None and self._rebalancer.conclude(msg, time.monotonic()):
            self._conclude(msg.error)

    def _conclude(self, error: str) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(error)

    def rescaled(self, num_ranks: int) -> Placement:
        """Returns the placement for another number of ranks, to Join with."""
        assert self._rebalancer is not None
        return self._rebalancer.rescaled(num_ranks, self._redundant)

    def view(self) -> ExpertsView:
        """Returns what there is to see now."""
        recent_LE = self._load_LE if self._rebalancer is None else self._rebalancer.load_LE
        return ExpertsView(
            placement=self.table,
            num_layers=len(self._load_LE),
            counts=self._load_LE.astype("<i8").tobytes(),
            recent=recent_LE.astype("<f8").tobytes(),
            balance=1.0 if self._rebalancer is None else float(self._rebalancer.balance().mean()),
            moved_bytes=self.moved_bytes,
            why=self.why,
            decisions=tuple(self._decisions),
            num_placed=self.num_placed,
            num_given_up=self.num_given_up,
        )
