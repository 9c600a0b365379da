"""The experts of a fleet: their active placement, their load, and a placement being prepared.

Import this module late, because no other part of a fleet needs numpy.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from moeserve.cluster.assignment import at_start, equal_shares
from moeserve.cluster.view import ExpertsView, RebalanceDecision
from moeserve.messages import ExpertLoad, PlacementResult, PlacementTable
from moeserve.moe.placement.placement import ONE_NODE, Nodes, Placement
from moeserve.moe.placement.rebalance import Rebalancer

if TYPE_CHECKING:
    from moeserve.config import ParallelConfig
    from moeserve.models.spec import ModelSpec

NUM_KEPT_DECISIONS = 32


class Rebalancing:
    """The experts of a fleet: L MoE layers of E experts. Belongs to the fleet's loop.

    `rebalancer.current` is the active placement as far as the fleet knows. If a rank has another
    one, the next Join corrects it.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        num_ranks: int,
        redundant: int,
        nodes: Nodes = ONE_NODE,
    ) -> None:
        first = Placement.initial(num_layers, num_experts, num_ranks, redundant, nodes)
        self.rebalancer = Rebalancer(first, nodes=nodes)
        self._num_placed = 0
        self._num_given_up = 0
        self._decisions: deque[RebalanceDecision] = deque(maxlen=NUM_KEPT_DECISIONS)
        self._redundant = redundant
        self._load_LE = np.zeros((num_layers, num_experts), np.int64)
        self._is_solving = False
        self._delayed_loads: list[ExpertLoad] = []  # reports received while the solver runs
        self._outcome: asyncio.Future[str] | None = None  # of the proposed placement

    @classmethod
    def of(
        cls, spec: "ModelSpec", parallel: "ParallelConfig", machines: Sequence[int] = ()
    ) -> "Rebalancing":
        """Return the experts of a model, sharded over all ranks.

        machines: the machine of each engine; by default those at the start of a server.
        """
        router = spec.moe.router if spec.moe is not None else None
        groups = router.groups if router is not None and router.kept_groups < router.groups else 1
        machines = machines or at_start(parallel)
        nodes = Nodes(equal_shares(machines), groups)
        ranks = len(machines) * parallel.tp
        return cls(len(spec.moe_layers), spec.num_experts, ranks, parallel.redundant_experts, nodes)

    @property
    def table(self) -> PlacementTable:
        """The active placement, as a message."""
        return self.rebalancer.current.to_table()

    def joined(self, table: PlacementTable | None, expert_bytes: int, num_nodes: int = 1) -> None:
        """Record that all ranks have joined a group with this placement.

        A placement that was being prepared is dropped.

        num_nodes: number of nodes if all have equally many ranks, see `Nodes`.
        """
        self.rebalancer.set_nodes(self._nodes(num_nodes), expert_bytes)
        if table is not None:
            self.rebalancer.joined(Placement.from_table(table))
        self._resolve_outcome("the group was formed again")

    def note(self, load: ExpertLoad) -> None:
        """Add an engine's report of expert load.

        Reports of another shape are dropped; they come from null runners, which have no model.
        """
        counts = np.frombuffer(load.counts, "<i8")
        if counts.size != self._load_LE.size:
            return
        self._load_LE += counts.reshape(self._load_LE.shape)
        if self._is_solving:
            self._delayed_loads.append(load)
        else:
            self.rebalancer.note(load, time.monotonic())

    async def propose(self, *, force: bool) -> Placement | None:
        """Solve for a better placement in a thread. Return None if no placement is worth its cost.

        The caller must send the placement to the engines and await `outcome`.

        force: ignore the cost of moving experts.
        """
        self._is_solving = True
        try:
            placement = await asyncio.to_thread(self.rebalancer.propose, time.monotonic(), force)
        finally:
            self._is_solving = False
            for load in self._delayed_loads:
                self.rebalancer.note(load, time.monotonic())
            self._delayed_loads = []
        if placement is not None:
            self._outcome = asyncio.get_running_loop().create_future()
        return placement

    def decided(self, decision: RebalanceDecision) -> None:
        """Record a decision for the view."""
        self._decisions.append(decision)
        if decision.error:
            self._num_given_up += 1
        else:
            self._num_placed += 1

    async def outcome(self) -> str:
        """Wait for the proposed placement. Return "" if it became active, otherwise why not."""
        assert self._outcome is not None
        return await asyncio.shield(self._outcome)

    def placed(self, msg: PlacementResult) -> None:
        """Record an engine's result. All engines report the same, so the first result decides."""
        if self.rebalancer.conclude(msg, time.monotonic()):
            self._resolve_outcome(msg.error)

    def _resolve_outcome(self, error: str) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(error)

    def rescaled(self, old_ranks: Sequence[int], num_nodes: int) -> Placement:
        """Return the placement for a changed set of ranks, for a Join.

        old_ranks: the previous number of each rank, -1 for a new rank.
        """
        return self.rebalancer.rescaled(
            len(old_ranks), self._redundant, self._nodes(num_nodes), old_ranks
        )

    def _nodes(self, number: int) -> Nodes:
        return replace(self.rebalancer.nodes, number=number)

    def view(self) -> ExpertsView:
        """Return a snapshot of placement and load."""
        rebalancer = self.rebalancer
        return ExpertsView(
            placement=self.table,
            num_layers=len(self._load_LE),
            counts=self._load_LE.astype("<i8").tobytes(),
            recent=rebalancer.load_LE.astype("<f8").tobytes(),
            balance=float(rebalancer.balance().mean()),
            moved_bytes=rebalancer.moved_bytes,
            why=rebalancer.why,
            decisions=tuple(self._decisions),
            num_placed=self._num_placed,
            num_given_up=self._num_given_up,
        )
