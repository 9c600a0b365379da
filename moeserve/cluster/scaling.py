"""Start a fleet, and change it while it serves: scale it, drain machines, and move experts."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from moeserve.actor.tasks import cancel, every, log_error, spawn
from moeserve.cluster.assignment import assign_new_engines, initial_machines, num_equal_nodes
from moeserve.cluster.changes import Changes
from moeserve.cluster.check_parallel import check_parallel, check_scale
from moeserve.cluster.engine_group import JOIN_S, EngineGroup, check_same_model
from moeserve.cluster.engine_state import EngineState, LeftFleet
from moeserve.cluster.engine_supervisor import EngineSupervisor
from moeserve.cluster.fleet_state import FleetState
from moeserve.cluster.host import FleetSnapshot, Host, RemoteHost, Root, RootHost
from moeserve.cluster.link import FromEngine
from moeserve.cluster.order import Role, role_of
from moeserve.cluster.rendezvous import Rendezvous
from moeserve.cluster.rundir import RunDir
from moeserve.cluster.view import RebalanceDecision
from moeserve.config import Config
from moeserve.errors import ConfigError, Conflict, InvalidRequest, MoeserveError
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import PlacementTable, UpdatePlacement
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from moeserve.actor.actor import Inbox
    from moeserve.cluster.rebalancing import FleetExperts
    from moeserve.moe.placement.placement import Placement

log = logging.getLogger(__name__)

BOOT_TIMEOUT_S = 1800.0  # for new engines to start; a hanging one is noticed long before
MOVE_TIMEOUT_S = 600.0  # for a placement to be prepared and become active
REBALANCE_CHECK_INTERVAL_S = 5.0  # between two checks whether experts should be moved
BOOT_CHECK_INTERVAL_S = 1.0  # between two checks of machines whose engines start
# Placement versions reserved for each front end, so that those of the next one are higher.
NUM_VERSIONS = 1 << 16

T = TypeVar("T")


class Scaling:
    """Starts the engines of a fleet and makes changes, one at a time.

    A change is completed, or undone with the cause in the error, before the next one begins.
    """

    def __init__(
        self,
        fleet: FleetState,
        config: Config,
        outbox: "Inbox[FromEngine]",
        root: Root | None,
        options: dict[str, Any],
    ) -> None:
        """Prepare a fleet; `start` starts its engines.

        Args:
            root: the root process, if it keeps this machine's engines (--standby).
            options: keyword arguments of each `EngineSupervisor`.
        """
        self.rendezvous: Rendezvous  # set by `start`
        self._fleet = fleet
        self._config = config
        self._outbox = outbox
        self._root = root
        self._options = options
        self._run_dir: RunDir
        self._spec: ModelSpec
        self._rebalance_checks: asyncio.Task[None] | None = None
        self._changes = Changes()
        # The drained machines:
        self._return_tasks: dict[Host, asyncio.Task[None]] = {}  # wait for their agents to return
        self._num_engines_before: dict[int, int] = {}  # by the machine's number

    # ---- start and end

    async def start(self, snapshot: FleetSnapshot | None) -> None:
        """Start all engines. Raises ConfigError for settings that cannot work.

        snapshot: the fleet of the previous front end, to continue with.
        """
        fleet = self._fleet
        parallel = self._config.parallel
        spec = self._spec = read_model_spec(resolve_model_dir(self._config.model.model))
        check_parallel(self._config, spec)
        if snapshot is None:
            machines = initial_machines(parallel)
            snapshot = FleetSnapshot(engines=dict(enumerate(machines)), drained={}, placement=None)
        if parallel.ep == "on" and spec.num_experts and not fleet.single:
            # In a thread, because it imports numpy.
            fleet.shard_experts(await asyncio.to_thread(self._initial_experts, snapshot))
        self._run_dir = RunDir()
        try:
            self.rendezvous = await Rendezvous.open(self._config, self._run_dir.path, self._root)
        except BaseException:
            self._run_dir.close()
            raise
        hosts = self.rendezvous.hosts
        ranks = list(snapshot.engines)
        for rank, machine in snapshot.engines.items():
            self._add_to_table(rank, hosts[machine])
        fleet.set_members(ranks)
        placement = fleet.experts.placement_table if fleet.experts is not None else None
        for rank in ranks:
            fleet.table.supervisor(rank).start(self._role_of(rank, ranks, placement))
        groups = [ranks] if fleet.is_one_group else [[rank] for rank in ranks]
        self._add_groups(groups, placement)
        if fleet.experts is not None and parallel.rebalance == "auto":
            checks = every(
                REBALANCE_CHECK_INTERVAL_S, self._rebalance_if_it_pays, name="rebalancing"
            )
            self._rebalance_checks = spawn(checks, name="rebalancing", on_error=log_error)
        for machine, num_engines in snapshot.drained.items():
            self._await_return(hosts[machine], num_engines)

    def _initial_experts(self, snapshot: FleetSnapshot) -> "FleetExperts":
        from moeserve.cluster.rebalancing import FleetExperts  # late import: it needs numpy
        from moeserve.moe.placement.placement import Placement

        machines = list(snapshot.engines.values())
        experts = FleetExperts.of(self._spec, self._config.parallel, machines)
        if self._root is not None:
            first = experts.rebalancer.current
            if snapshot.placement is not None:
                first = Placement.from_table(snapshot.placement)
            # Engines that served an earlier front end know its versions. Those of this front end
            # must be higher.
            first_version = self._root.made_at * NUM_VERSIONS
            experts.rebalancer.joined(replace(first, version=first_version))
        return experts

    def _add_to_table(self, rank: int, host: Host) -> None:
        """Add an engine to the table of engines, but not yet to the members of the fleet."""
        fleet = self._fleet
        grouped = fleet.is_one_group or self._config.parallel.tp > 1
        state = EngineState(
            rank=rank, host=host.name, machine=host.number, grouped=grouped, held=grouped
        )
        supervisor = EngineSupervisor(
            state.name,
            host,
            self._config,
            state=lambda: fleet.table[rank],
            report=partial(fleet.on_event, rank),
            outbox=self._outbox,
            **self._options,
        )
        fleet.table.add(state, supervisor)

    def _role_of(self, rank: int, members: Sequence[int], placement: PlacementTable | None) -> Role:
        return role_of(
            self._config.parallel,
            dp_rank=members.index(rank),
            machines=[state.machine for state in self._fleet.table.states_of(members)],
            placement=placement,
            is_one_group=self._fleet.is_one_group,
        )

    def _add_groups(
        self, groups: Iterable[Sequence[int]], placement: PlacementTable | None
    ) -> None:
        """Form a group of each of these lists of engines."""
        fleet = self._fleet
        fleet.add_groups(
            EngineGroup(
                fleet.table,
                members,
                self.rendezvous,
                placement=placement,
                on_formed=fleet.on_group_formed,
                on_failed=fleet.on_group_failed,
            )
            for members in groups
        )

    def _set_placement(self, placement: PlacementTable | None) -> None:
        """Use the present members and this placement for processes that start from now on."""
        fleet = self._fleet
        for rank in fleet.members:
            role = self._role_of(rank, fleet.members, placement)
            fleet.table.supervisor(rank).assign(role)
        for group in fleet.groups:
            group.set_placement(placement)
        self._save_snapshot()

    def _save_snapshot(self) -> None:
        """Send the state of the fleet to the root process, if there is one."""
        root = self.rendezvous.hosts[0]
        if isinstance(root, RootHost):
            engines = {state.rank: state.machine for state in self._fleet.member_states}
            placement = self._fleet.groups[0].placement
            drained = self._num_engines_before
            root.send(FleetSnapshot(engines=engines, drained=drained, placement=placement))

    async def close(self, cause: str) -> None:
        """Release groups and machines after the engines have ended.

        cause: why the fleet failed, empty if it was stopped.
        """
        for group in self._fleet.groups:
            await group.close()
        await self.rendezvous.close(cause)
        self._run_dir.close()

    @property
    def drained(self) -> Collection[Host]:
        """The drained machines."""
        return self._return_tasks.keys()

    # ---- one change at a time

    async def scale(self, dp: int) -> int:
        """Change the number of engines to `dp` while requests continue.

        Return the previous number of engines. Raises InvalidRequest for a number that cannot work,
        Conflict if another change is in progress or this one was undone.
        """
        if not isinstance(dp, int) or not 1 <= dp <= 1024:
            raise InvalidRequest(f"dp must be from 1 to 1024, not {dp}", param="dp")
        try:
            check_scale(self._config, self._spec, dp)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="dp") from error
        return await self._run_change(self._scale(dp))

    async def drain(self, machine: int) -> int:
        """Take a machine out of service, even a lost one.

        Its requests and experts are moved to the other machines, then its agent is released. If an
        agent joins as this machine later, it gets the same number of engines again.

        Return the previous number of engines of the fleet. Raises InvalidRequest and Conflict.
        """
        hosts = self.rendezvous.hosts
        if not 0 < machine < len(hosts):
            why = f"there are {len(hosts)} machines"
            if machine == 0:
                why = "it answers HTTP and keeps the requests"
            raise InvalidRequest(f"machine {machine} cannot be drained: {why}", param="machine")
        return await self._run_change(self._drain(hosts[machine]))

    async def rebalance(self) -> RebalanceDecision | None:
        """Move experts to fit the load so far, even if that is not worth its cost.

        Return None if they fit already. Raises Conflict if this fleet has no experts to move or
        another change is in progress.
        """
        if self._fleet.experts is None:
            raise Conflict("there are no experts to move: the model is dense, or --ep is off")
        return await self._run_change(self._rebalance(forced=True))

    async def _rebalance_if_it_pays(self) -> None:
        """Move experts if that is worth its cost and no other change is in progress.

        An administrator's change waits until this one is complete.
        """
        fleet = self._fleet
        if self._changes.in_progress or fleet.ready is None or not fleet.groups[0].complete:
            return
        try:
            await self._changes.run_automatic(self._rebalance(forced=False))
        except Conflict as cause:
            log.info("experts were not moved: %s", cause)

    async def stop(self) -> None:
        """Cancel the change in progress, and the tasks that would begin another."""
        await cancel(self._rebalance_checks, *self._return_tasks.values())
        await self._changes.stop()

    async def _run_change(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change that was asked for. Raises Conflict."""
        if self._fleet.ready is None:
            change.close()
            raise Conflict("the engines are not ready")
        return await self._changes.run(change)

    # ---- the number of engines

    async def _scale(self, dp: int) -> int:
        fleet = self._fleet
        num_before = len(fleet.members)
        if dp > num_before:
            num_engines_of = Counter(state.machine for state in fleet.member_states)
            hosts = self.rendezvous.hosts
            engines_on_connected = {
                host.number: num_engines_of[host.number] for host in hosts if not host.is_missing
            }
            machines = assign_new_engines(dp - num_before, engines_on_connected)
            await self._grow([hosts[machine] for machine in machines])
        elif dp < num_before:
            lowest = sorted(fleet.members)[:dp]
            remaining = [rank for rank in fleet.members if rank in lowest]
            await self._shrink(remaining, f"the fleet was scaled down to {dp}")
        return num_before

    def _placement_for(self, members: Sequence[int]) -> PlacementTable | None:
        """Return the experts' placement for these members, None if experts are not sharded."""
        experts = self._fleet.experts
        old_members = self._fleet.members
        tp = self._config.parallel.tp
        if experts is None:
            return None
        # The expert rank that each rank had before, -1 for the ranks of new engines. The ranks of
        # an engine are consecutive.
        old_expert_ranks: list[int] = []
        for engine in members:
            if engine in old_members:
                first = old_members.index(engine) * tp
                old_expert_ranks += range(first, first + tp)
            else:
                old_expert_ranks += [-1] * tp
        machines = [state.machine for state in self._fleet.table.states_of(members)]
        return experts.rescaled_placement(old_expert_ranks, num_equal_nodes(machines)).to_table()

    async def _grow(self, hosts: Sequence[Host]) -> None:
        """Add an engine on each of these machines. They start while the other engines serve."""
        fleet = self._fleet
        old_members = fleet.members
        missing_hosts = [host for host in self._hosts_of(old_members) if host.is_missing]
        if fleet.is_one_group and missing_hosts:
            raise Conflict(f"{missing_hosts[0].name} is missing; start it again, or drain it")
        free_ranks = [
            rank for rank in range(len(old_members) + len(hosts)) if rank not in fleet.table
        ]
        new_ranks = free_ranks[: len(hosts)]
        for rank, host in zip(new_ranks, hosts, strict=True):
            self._add_to_table(rank, host)
        # Sorted by machine, because a placement that considers nodes needs the ranks of a node to
        # be consecutive.
        members = sorted(
            [*old_members, *new_ranks], key=lambda rank: (fleet.table[rank].machine, rank)
        )
        try:
            placement = await asyncio.to_thread(self._placement_for, members)
            for rank in new_ranks:
                fleet.table.supervisor(rank).start(self._role_of(rank, members, placement))
            await self._wait_until_up(new_ranks)
            if placement is not None:
                await self._form_group(members, placement)
            else:
                fleet.set_members(members)
                self._add_groups(([rank] for rank in new_ranks), placement=None)
                self._set_placement(None)
        except BaseException as error:  # also if `stop` cancels the change
            for rank in new_ranks:
                fleet.table.apply(rank, LeftFleet())
            await self._close_engines(new_ranks)
            if isinstance(error, MoeserveError):
                raise Conflict(
                    f"{len(old_members)} engines continue, growing to {len(members)} failed: "
                    f"{error}"
                ) from error
            raise
        self._settle(len(old_members))

    def _hosts_of(self, ranks: Iterable[int]) -> list[Host]:
        return [self._fleet.table.supervisor(rank).host for rank in ranks]

    async def _close_engines(self, ranks: Iterable[int]) -> None:
        """Close engines that have left the fleet, and remove them from the table."""
        table = self._fleet.table
        await asyncio.gather(*(table.supervisor(rank).close(timeout_s=0.0) for rank in ranks))
        for rank in ranks:
            table.remove(rank)

    def _settle(self, num_before: int) -> None:
        """Announce the changed members to the front end."""
        self._fleet.settle()
        log.info("%d engines serve; there were %d", len(self._fleet.members), num_before)

    async def _wait_until_up(self, new_ranks: Sequence[int]) -> None:
        """Wait until the new engines are up. Raises the error if one of them fails."""
        table = self._fleet.table
        deadline_s = time.monotonic() + BOOT_TIMEOUT_S

        def all_up_or_one_ended() -> bool:
            states = table.states_of(new_ranks)
            return all(state.up for state in states) or any(state.end for state in states)

        while True:
            try:
                async with asyncio.timeout(BOOT_CHECK_INTERVAL_S):
                    await table.wait_until(all_up_or_one_ended)
                break
            except TimeoutError:
                late = [state for state in table.states_of(new_ranks) if not state.up]
                self._raise_if_late(late, deadline_s)
        for state in table.states_of(new_ranks):
            if state.end is not None:
                raise state.end.error()
        states = [*self._fleet.member_states, *table.states_of(new_ranks)]
        check_same_model([state.ready for state in states if state.ready is not None])

    def _raise_if_late(self, late: Sequence[EngineState], deadline_s: float) -> None:
        """Raise ConfigError if engines that are not up have lost their machine or are too late."""
        hosts = self._hosts_of(state.rank for state in late)
        lost_hosts = [host.name for host in hosts if host.is_missing]
        names = ", ".join(state.name for state in late)
        if lost_hosts:
            raise ConfigError(f"{names}: {lost_hosts[0]} was lost")
        if time.monotonic() > deadline_s:
            raise ConfigError(f"{names}: they did not load within {BOOT_TIMEOUT_S:g} s")

    async def _form_group(self, members: Sequence[int], placement: PlacementTable) -> None:
        """Form the group with these members. If that fails, restore it and raise Conflict."""
        fleet = self._fleet
        (group,) = fleet.groups
        assert fleet.experts is not None
        old_members = fleet.members
        old_placement = fleet.experts.placement_table
        fleet.set_members(members)
        outcome = group.regroup(members, placement)
        # With a timeout, because the group waits without limit for an old engine that is lost.
        await asyncio.wait([outcome], timeout=JOIN_S)
        cause = outcome.result() if outcome.done() else f"not all joined within {JOIN_S:g} s"
        if cause:
            fleet.set_members(old_members)
            group.regroup(old_members, old_placement)
            raise Conflict(cause)
        self._set_placement(placement)

    async def _shrink(self, remaining: Sequence[int], cause: str) -> None:
        """Remove all engines but `remaining`.

        Their requests are returned to the front end at once. The remaining engines form the group
        again.
        """
        fleet = self._fleet
        num_before = len(fleet.members)
        if all(state.end is not None for state in fleet.table.states_of(remaining)):
            raise Conflict("the engines that would stay have failed; restart the server")
        leaving = [rank for rank in fleet.members if rank not in remaining]
        placement = await asyncio.to_thread(self._placement_for, remaining)
        fleet.set_members(remaining)
        for group in fleet.detach(leaving, cause):
            await group.close()
        self._set_placement(placement)
        # Close them while the remaining engines form their new group (`gather` starts a task). All
        # engines vote on each step, so they leave the old group after the same step.
        closing = asyncio.gather(self._close_engines(leaving))
        try:
            if placement is not None:
                # If this epoch fails, the next one has the same members. Do not wait while another
                # engine is lost, because no epoch can succeed before it is up again.
                regrouping = fleet.groups[0].regroup(remaining, placement)
                all_up = all(state.up for state in fleet.table.states_of(remaining))
                await asyncio.wait([regrouping], timeout=JOIN_S if all_up else 0.0)
        finally:
            await closing
        self._settle(num_before)

    # ---- a machine that leaves, and comes back

    async def _drain(self, host: Host) -> int:
        fleet = self._fleet
        num_before = len(fleet.members)
        remaining = [state.rank for state in fleet.member_states if state.machine != host.number]
        num_engines = num_before - len(remaining)
        assert isinstance(host, RemoteHost)
        if host in self._return_tasks:
            raise Conflict(f"{host.name} is drained already")
        try:
            check_scale(self._config, self._spec, len(remaining))
        except ConfigError as error:
            raise Conflict(f"{host.name} cannot be drained: {error}") from error
        if num_engines:
            await self._shrink(remaining, f"{host.name} is drained")
        await host.close("")
        self._await_return(host, num_engines)
        self._save_snapshot()
        return num_before

    def _await_return(self, host: Host, num_engines: int) -> None:
        assert isinstance(host, RemoteHost)
        self._num_engines_before[host.number] = num_engines
        self._return_tasks[host] = spawn(
            self._readmit(host, num_engines),
            name=f"return of {host.name}",
            on_error=partial(self._on_return_failed, host),
        )

    async def _readmit(self, host: RemoteHost, num_engines: int) -> None:
        """Start engines on a drained machine again once an agent joins as this machine."""
        while True:
            await host.connected.wait()
            # `_run_change` would raise Conflict meanwhile.
            while self._changes.in_progress or self._fleet.ready is None:  # noqa: ASYNC110
                await asyncio.sleep(BOOT_CHECK_INTERVAL_S)
            try:
                if num_engines:
                    await self._run_change(self._grow([host] * num_engines))
                break
            except Conflict as cause:
                log.warning("%s is back, but without its engines: %s", host.name, cause)
                if not host.is_missing:
                    break  # POST /v1/admin/scale can add them
        self._end_return(host)

    def _on_return_failed(self, host: RemoteHost, name: str, error: Exception) -> None:
        log_error(name, error)
        self._end_return(host)  # without its engines: POST /v1/admin/scale adds them

    def _end_return(self, host: RemoteHost) -> None:
        del self._return_tasks[host]
        del self._num_engines_before[host.number]
        self._save_snapshot()

    # ---- the placement of the experts

    async def _rebalance(self, *, forced: bool) -> RebalanceDecision | None:
        """Propose a placement and make it active. Return None if there is no better one.

        forced: propose it even if it is not worth its cost.
        """
        experts = self._fleet.experts
        assert experts is not None
        placement = await experts.propose(force=forced)
        (group,) = self._fleet.groups
        if placement is None:
            return None
        began_at_s = time.monotonic()
        moved_bytes_before = experts.rebalancer.moved_bytes
        error = await self._move(group, placement)
        decision = RebalanceDecision(
            at_s=began_at_s,
            forced=forced,
            version=placement.version,
            moved_bytes=experts.rebalancer.moved_bytes - moved_bytes_before,
            took_s=time.monotonic() - began_at_s,
            error=error,
        )
        experts.record_decision(decision)
        outcome = error or f"active after {decision.took_s:.2f} s"
        log.info("placement %d: %s", placement.version, outcome)
        return decision

    async def _move(self, group: EngineGroup, placement: "Placement") -> str:
        """Make a placement active. Return why that failed, or ""."""
        experts = self._fleet.experts
        assert experts is not None
        try:
            if not group.complete:
                raise MoeserveError("the group of engines is not complete")
            for rank in group.members:
                self._fleet.table.send(rank, UpdatePlacement(placement.to_table()))
            async with asyncio.timeout(MOVE_TIMEOUT_S):
                error = await experts.wait_outcome()
        except TimeoutError:
            error = f"not all engines were done within {MOVE_TIMEOUT_S:g} s"
        except MoeserveError as cause:
            error = str(cause)
        else:
            # If the engines gave up (`error`), this placement has the layers that were done.
            self._set_placement(experts.placement_table)
            return error
        # Some engines may have begun: form the group again with the placement that was active.
        group.regroup(group.members, experts.placement_table)
        return error
