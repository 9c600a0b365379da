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

from moeserve.cluster.assignment import initial_machines, num_equal_nodes
from moeserve.cluster.view import ExpertsView, RebalanceDecision
from moeserve.messages import ExpertLoad, PlacementResult, PlacementTable
from moeserve.moe.placement.placement import ONE_NODE, Nodes, Placement
from moeserve.moe.placement.rebalance import Rebalancer

if TYPE_CHECKING:
    from moeserve.config import ParallelConfig
    from moeserve.models.spec import ModelSpec

NUM_KEPT_DECISIONS = 32


class FleetExperts:
    """The experts of a fleet. Belongs to the fleet's loop.

    `rebalancer.current` is the active placement as far as the fleet knows. If a rank has another
    one, the next Join corrects it.

    Suffixes of arrays are their dimensions. L: MoE layers. E: experts of a layer.
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
        self._num_placed = 0  # decisions that became active
        self._num_given_up = 0  # decisions that failed
        self._decisions: deque[RebalanceDecision] = deque(maxlen=NUM_KEPT_DECISIONS)
        self._redundant = redundant
        self._load_LE = np.zeros((num_layers, num_experts), np.int64)  # tokens since the start
        self._is_solving = False
        self._delayed_loads: list[ExpertLoad] = []  # reports received while the solver runs
        self._outcome: asyncio.Future[str] | None = None  # of the proposed placement

    @classmethod
    def of(
        cls, spec: "ModelSpec", parallel: "ParallelConfig", machines: Sequence[int] = ()
    ) -> "FleetExperts":
        """Return the experts of a model, sharded over all ranks.

        machines: the machine of each engine; by default those at the start of a server.
        """
        machines = machines or initial_machines(parallel)
        return cls(
            num_layers=len(spec.moe_layers),
            num_experts=spec.num_experts,
            num_ranks=len(machines) * parallel.tp,
            redundant=parallel.redundant_experts,
            nodes=Nodes(num_equal_nodes(machines), _num_router_groups(spec)),
        )

    @property
    def placement_table(self) -> PlacementTable:
        """The active placement, as a message."""
        return self.rebalancer.current.to_table()

    def on_group_formed(
        self, table: PlacementTable | None, expert_bytes: int, num_nodes: int = 1
    ) -> None:
        """Record that all ranks have joined a group with this placement.

        A placement that was being prepared is dropped.

        num_nodes: see `num_equal_nodes`.
        """
        self.rebalancer.set_nodes(self._nodes(num_nodes), expert_bytes)
        if table is not None:
            self.rebalancer.joined(Placement.from_table(table))
        self._resolve_outcome("the group was formed again")

    def add_load(self, load: ExpertLoad) -> None:
        """Add an engine's report of expert load.

        Reports of another shape are dropped; they come from null runners, which have no model.
        """
        counts = np.frombuffer(load.counts, "<i8")
        if counts.size != self._load_LE.size:
            return
        self._load_LE += counts.reshape(self._load_LE.shape)
        if self._is_solving:  # the solver's thread reads the loads of the rebalancer
            self._delayed_loads.append(load)
        else:
            self.rebalancer.note(load, time.monotonic())

    async def propose(self, *, force: bool) -> Placement | None:
        """Solve for a better placement in a thread. Return None if no placement is worth its cost.

        The caller must send the placement to the engines and await `wait_outcome`.

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

    def record_decision(self, decision: RebalanceDecision) -> None:
        """Record a decision for the view."""
        self._decisions.append(decision)
        if decision.error:
            self._num_given_up += 1
        else:
            self._num_placed += 1

    async def wait_outcome(self) -> str:
        """Wait for the proposed placement. Return "" if it became active, otherwise why not."""
        assert self._outcome is not None
        return await asyncio.shield(self._outcome)

    def on_placement_result(self, msg: PlacementResult) -> None:
        """Record an engine's result. All engines report the same, so the first result decides."""
        if self.rebalancer.conclude(msg, time.monotonic()):
            self._resolve_outcome(msg.error)

    def _resolve_outcome(self, error: str) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(error)

    def rescaled_placement(self, old_ranks: Sequence[int], num_nodes: int) -> Placement:
        """Return the placement for a changed set of ranks, for a Join.

        old_ranks: the previous number of each rank, -1 for a new rank.
        num_nodes: see `num_equal_nodes`.
        """
        return self.rebalancer.next_rescaled(
            len(old_ranks), self._redundant, self._nodes(num_nodes), old_ranks
        )

    def _nodes(self, number: int) -> Nodes:
        return replace(self.rebalancer.nodes, num_nodes=number)

    def view(self) -> ExpertsView:
        """Return a snapshot of placement and load."""
        rebalancer = self.rebalancer
        return ExpertsView(
            placement=self.placement_table,
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


def _num_router_groups(spec: "ModelSpec") -> int:
    """Return the number of expert groups that the router chooses from; 1 if it does not."""
    router = spec.moe.router if spec.moe is not None else None
    if router is None or router.kept_groups >= router.groups:
        return 1
    return router.groups
