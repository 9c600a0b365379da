"""Changes of a fleet while it serves: more or fewer engines, other machines, experts elsewhere."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from moeserve.actor.tasks import cancel, every, log_error, spawn
from moeserve.cluster.assignment import at_start, equal_shares, spread
from moeserve.cluster.check_parallel import check_parallel, check_scale
from moeserve.cluster.engine_group import JOIN_S, EngineGroup, combined
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
    from moeserve.cluster.rebalancing import Rebalancing
    from moeserve.moe.placement.placement import Placement

log = logging.getLogger(__name__)

BOOT_S = 1800.0  # for new engines to load; one that shows no progress is given up long before
MOVE_S = 600.0  # for a placement to be prepared and committed
CHECK_S = 5.0  # between two looks at the load of the experts
LOOK_S = 1.0  # between two looks at machines whose engines load
VERSIONS = 1 << 16  # placements of one front end; those of the next one have higher numbers

T = TypeVar("T")


class Scaling:
    """Starts the engines of a fleet, and changes them, one change at a time.

    Each change is done, or undone with its cause in the error, before the next one begins.
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
            root: the process that keeps the engines of this machine, if that is another one.
            options: of each `EngineSupervisor`.
        """
        self.machines: Rendezvous  # from `start` on
        self._fleet = fleet
        self._config = config
        self._outbox = outbox
        self._root = root
        self._options = options
        self._run_dir: RunDir
        self._spec: ModelSpec
        self._watching: asyncio.Task[None] | None = None
        self._change: asyncio.Task[Any] | None = None  # the one that is under way
        # By drained machine: the task that waits for its return, and how many engines it had.
        self._returning: dict[Host, asyncio.Task[None]] = {}
        self._engines_before: dict[int, int] = {}

    # ---- start and end

    async def start(self, snapshot: FleetSnapshot | None) -> None:
        """Start all engines. Raises ConfigError for settings that cannot work.

        snapshot: the fleet of the front end before this one, to continue with.
        """
        fleet = self._fleet
        parallel = self._config.parallel
        spec = self._spec = read_model_spec(resolve_model_dir(self._config.model.model))
        check_parallel(self._config, spec)
        snapshot = snapshot or FleetSnapshot(dict(enumerate(at_start(parallel))), {}, None)
        if parallel.ep == "on" and spec.num_experts and not fleet.single:
            fleet.shard_experts(await asyncio.to_thread(self._first_experts, snapshot))
        self._run_dir = RunDir()
        try:
            self.machines = await Rendezvous.open(self._config, self._run_dir.path, self._root)
        except BaseException:
            self._run_dir.close()
            raise
        hosts = self.machines.hosts
        ranks = list(snapshot.engines)
        for rank, machine in snapshot.engines.items():
            self._add(rank, hosts[machine])
        fleet.set_members(ranks)
        table = fleet.experts.table if fleet.experts is not None else None
        for rank in ranks:
            fleet.table.supervisor(rank).start(self._role_of(rank, ranks, table))
        self._add_groups([ranks] if fleet.together else [[rank] for rank in ranks], table)
        if fleet.experts is not None and parallel.rebalance == "auto":
            watch = every(CHECK_S, self._rebalance_if_it_pays, name="rebalancing")
            self._watching = spawn(watch, name="rebalancing", on_error=log_error)
        for machine, num_engines in snapshot.drained.items():
            self._await_return(hosts[machine], num_engines)

    def _first_experts(self, snapshot: FleetSnapshot) -> "Rebalancing":
        from moeserve.cluster.rebalancing import Rebalancing  # here, because it needs numpy
        from moeserve.moe.placement.placement import Placement

        machines = list(snapshot.engines.values())
        experts = Rebalancing.of(self._spec, self._config.parallel, machines)
        if self._root is not None:
            # Engines that served another front end know its placements by their versions.
            table = snapshot.placement
            first = experts.rebalancer.current if table is None else Placement.from_table(table)
            experts.rebalancer.joined(replace(first, version=self._root.made_at * VERSIONS))
        return experts

    def _add(self, rank: int, host: Host) -> None:
        """Add an engine to the table, not yet to the members."""
        fleet = self._fleet
        state = EngineState(
            rank=rank,
            host=host.name,
            machine=host.number,
            grouped=fleet.together or self._config.parallel.tp > 1,
            held=fleet.together or self._config.parallel.tp > 1,
        )
        supervisor = EngineSupervisor(
            state.name,
            host,
            self._config,
            state=partial(fleet.table.__getitem__, rank),
            report=partial(fleet.heard, rank),
            outbox=self._outbox,
            **self._options,
        )
        fleet.table.add(state, supervisor)

    def _role_of(self, rank: int, members: Sequence[int], table: PlacementTable | None) -> Role:
        machines = [state.machine for state in self._fleet.table.of(members)]
        number = members.index(rank)
        return role_of(self._config.parallel, self._fleet.together, number, machines, table)

    def _add_groups(self, groups: Iterable[Sequence[int]], table: PlacementTable | None) -> None:
        """Let each of these lists of engines meet as a group."""
        fleet = self._fleet
        fleet.add_groups(
            EngineGroup(
                fleet.table,
                members,
                self.machines,
                placement=table,
                on_met=fleet.on_met,
                on_failed=fleet.on_group_failed,
            )
            for members in groups
        )

    def _set_placement(self, placement: PlacementTable | None) -> None:
        """Give this membership and placement to the processes that start from now on."""
        fleet = self._fleet
        for rank in fleet.members:
            role = self._role_of(rank, fleet.members, placement)
            fleet.table.supervisor(rank).assign(role)
        for group in fleet.groups:
            group.set_placement(placement)
        self._save_snapshot()

    def _save_snapshot(self) -> None:
        """Send the root process, if there is one, what the next front end continues with."""
        root = self.machines.hosts[0]
        if isinstance(root, RootHost):
            engines = {state.rank: state.machine for state in self._fleet.member_states}
            placement = self._fleet.groups[0].placement
            root.tell(FleetSnapshot(engines, self._engines_before, placement))

    async def close(self, cause: str) -> None:
        """Release groups and machines, once the engines have ended.

        cause: why the fleet fails, empty if it stops.
        """
        for group in self._fleet.groups:
            await group.close()
        await self.machines.close(cause)
        self._run_dir.close()

    @property
    def drained(self) -> Collection[Host]:
        """The machines that were taken out of service."""
        return self._returning.keys()

    # ---- one change at a time

    async def scale(self, dp: int) -> int:
        """Change the number of engines to `dp` while requests continue.

        Return how many engines there were before. Raises InvalidRequest for a number that cannot
        work, Conflict if another change is under way or this one was undone.
        """
        if not isinstance(dp, int) or not 1 <= dp <= 1024:
            raise InvalidRequest(f"dp must be from 1 to 1024, not {dp}", param="dp")
        try:
            check_scale(self._config, self._spec, dp)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="dp") from error
        return await self._alone(self._scale(dp))

    async def drain(self, machine: int) -> int:
        """Take a machine out of service, also one that is lost.

        Its requests and experts go to the other machines, then its agent is released. If an agent
        joins as this machine later, it gets as many engines again. Return how many engines there
        were before. Raises InvalidRequest and Conflict.
        """
        hosts = self.machines.hosts
        if not 0 < machine < len(hosts):
            why = f"there are {len(hosts)} machines"
            if machine == 0:
                why = "it answers HTTP and keeps the requests"
            raise InvalidRequest(f"machine {machine} cannot be drained: {why}", param="machine")
        return await self._alone(self._drain(hosts[machine]))

    async def rebalance(self) -> RebalanceDecision | None:
        """Move experts to fit the load so far, even if that does not pay.

        Return None if they fit already. Raises Conflict if this fleet has no experts to move or
        another change is under way.
        """
        if self._fleet.experts is None:
            raise Conflict("there are no experts to move: the model is dense, or --ep is off")
        return await self._alone(self._rebalance(forced=True))

    async def _rebalance_if_it_pays(self) -> None:
        fleet = self._fleet
        if self._change is not None or fleet.ready is None or not fleet.groups[0].complete:
            return
        try:
            await self._alone(self._rebalance(forced=False))
        except Conflict as cause:
            log.info("experts stay where they are: %s", cause)

    async def stop(self) -> None:
        """Cancel the change that is under way, and let no other follow."""
        await cancel(self._watching, *self._returning.values(), self._change)

    async def _alone(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one change at a time, to its end even if the caller is cancelled."""
        if self._change is not None or self._fleet.ready is None:
            work.close()
            busy = self._change is not None
            raise Conflict("another change is under way" if busy else "the engines are not ready")
        change = spawn(work, name="change of the fleet", on_error=_log_unexpected)
        self._change = change
        change.add_done_callback(self._done)
        try:
            return await asyncio.shield(change)
        except asyncio.CancelledError:
            if change.cancelled():
                raise Conflict("the server is stopping") from None
            raise

    def _done(self, _change: asyncio.Task[Any]) -> None:
        self._change = None

    # ---- the number of engines

    async def _scale(self, dp: int) -> int:
        fleet = self._fleet
        before = len(fleet.members)
        if dp > before:
            here = Counter(state.machine for state in fleet.member_states)
            hosts = self.machines.hosts
            engines_on = {host.number: here[host.number] for host in hosts if not host.absent}
            await self._grow([hosts[number] for number in spread(dp - before, engines_on)])
        elif dp < before:
            lowest = sorted(fleet.members)[:dp]
            stay = [rank for rank in fleet.members if rank in lowest]
            await self._shrink(stay, f"only {dp} shall serve")
        return before

    def _rescaled(self, members: Sequence[int]) -> PlacementTable | None:
        """Return the placement for these members instead of the present ones."""
        experts = self._fleet.experts
        old = self._fleet.members
        tp = self._config.parallel.tp
        if experts is None:
            return None
        starts = [old.index(rank) * tp if rank in old else None for rank in members]
        was = [
            -1 if start is None else start + tp_rank for start in starts for tp_rank in range(tp)
        ]
        machines = [state.machine for state in self._fleet.table.of(members)]
        return experts.rescaled(was, equal_shares(machines)).to_table()

    async def _grow(self, hosts: Sequence[Host]) -> None:
        """Add an engine on each of these machines. They load while the others serve."""
        fleet = self._fleet
        old = fleet.members
        absent = [host for host in self._hosts_of(old) if host.absent]
        if fleet.together and absent:
            raise Conflict(f"{absent[0].name} is missing; start it again, or drain it")
        new = [rank for rank in range(len(old) + len(hosts)) if rank not in fleet.table]
        new = new[: len(hosts)]
        for rank, host in zip(new, hosts, strict=True):
            self._add(rank, host)
        members = sorted([*old, *new], key=lambda rank: (fleet.table[rank].machine, rank))
        try:
            table = await asyncio.to_thread(self._rescaled, members)
            for rank in new:
                fleet.table.supervisor(rank).start(self._role_of(rank, members, table))
            await self._boot(new)
            if table is not None:
                await self._meet(members, table)
            else:
                fleet.set_members(members)
                self._add_groups(([rank] for rank in new), None)
                self._set_placement(None)
        except BaseException as error:
            for rank in new:
                fleet.table.apply(rank, LeftFleet())
            await self._close_engines(new)
            if isinstance(error, MoeserveError):
                raise Conflict(
                    f"{len(old)} engines continue, {len(members)} could not be made to: {error}"
                ) from error
            raise
        self._settle(len(old))

    def _hosts_of(self, ranks: Iterable[int]) -> list[Host]:
        return [self._fleet.table.supervisor(rank).host for rank in ranks]

    async def _close_engines(self, ranks: Iterable[int]) -> None:
        """End engines that have left the fleet, and forget them."""
        table = self._fleet.table
        await asyncio.gather(*(table.supervisor(rank).close(0.0) for rank in ranks))
        for rank in ranks:
            table.remove(rank)

    def _settle(self, before: int) -> None:
        self._fleet.settle()
        log.info("%d engines serve; there were %d", len(self._fleet.members), before)

    async def _boot(self, new: Sequence[int]) -> None:
        """Return once the new engines are up. Raises the error that keeps one from serving."""
        table = self._fleet.table
        deadline_s = time.monotonic() + BOOT_S

        def decided() -> bool:
            states = table.of(new)
            return all(state.up for state in states) or any(state.end for state in states)

        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await table.until(decided)
                break
            except TimeoutError:
                self._raise_if_late([state for state in table.of(new) if not state.up], deadline_s)
        for state in table.of(new):
            if state.end is not None:
                raise state.end.error()
        states = [*self._fleet.member_states, *table.of(new)]
        combined([state.ready for state in states if state.ready is not None])

    def _raise_if_late(self, late: Sequence[EngineState], deadline_s: float) -> None:
        lost = [host.name for host in self._hosts_of(state.rank for state in late) if host.absent]
        names = ", ".join(state.name for state in late)
        if lost:
            raise ConfigError(f"{names}: {lost[0]} was lost")
        if time.monotonic() > deadline_s:
            raise ConfigError(f"{names}: they did not load within {BOOT_S:g} s")

    async def _meet(self, members: Sequence[int], table: PlacementTable) -> None:
        """Make these engines the group.

        Raises Conflict with the cause if the group stays as it was.
        """
        fleet = self._fleet
        (group,) = fleet.groups
        assert fleet.experts is not None
        old = fleet.members
        old_table = fleet.experts.table
        fleet.set_members(members)
        outcome = group.regroup(members, table)
        await asyncio.wait([outcome], timeout=JOIN_S)  # an old one may be lost meanwhile
        cause = outcome.result() if outcome.done() else f"not all were there within {JOIN_S:g} s"
        if cause:
            fleet.set_members(old)
            group.regroup(old, old_table)
            raise Conflict(cause)
        self._set_placement(table)

    async def _shrink(self, stay: Sequence[int], cause: str) -> None:
        """Remove the other engines: their requests are handed back at once, the rest meets anew."""
        fleet = self._fleet
        before = len(fleet.members)
        if all(state.end is not None for state in fleet.table.of(stay)):
            raise Conflict("the engines that would stay are gone for good; start the server anew")
        leave = [rank for rank in fleet.members if rank not in stay]
        table = await asyncio.to_thread(self._rescaled, stay)
        fleet.set_members(stay)
        for group in fleet.take_out(leave, cause):
            await group.close()
        self._set_placement(table)
        # By vote, some engines hold and the others end between the same two steps.
        ending = asyncio.gather(self._close_engines(leave))
        try:
            if table is not None:
                # If it fails, the next meeting has the same engines. It cannot succeed while
                # another machine is lost.
                meeting = fleet.groups[0].regroup(stay, table)
                all_up = all(state.up for state in fleet.table.of(stay))
                await asyncio.wait([meeting], timeout=JOIN_S if all_up else 0.0)
        finally:
            await ending
        self._settle(before)

    # ---- a machine that leaves, and comes back

    async def _drain(self, host: Host) -> int:
        fleet = self._fleet
        before = len(fleet.members)
        stay = [state.rank for state in fleet.member_states if state.machine != host.number]
        num_engines = before - len(stay)
        assert isinstance(host, RemoteHost)
        if host in self._returning:
            raise Conflict(f"{host.name} is drained already")
        try:
            check_scale(self._config, self._spec, len(stay))
        except ConfigError as error:
            raise Conflict(f"{host.name} cannot be drained: {error}") from error
        if num_engines:
            await self._shrink(stay, f"{host.name} is drained")
        await host.close("")
        self._await_return(host, num_engines)
        self._save_snapshot()
        return before

    def _await_return(self, host: Host, num_engines: int) -> None:
        assert isinstance(host, RemoteHost)
        self._engines_before[host.number] = num_engines
        self._returning[host] = spawn(
            self._take_back(host, num_engines),
            name=f"return of {host.name}",
            on_error=partial(self._on_return_failed, host),
        )

    async def _take_back(self, host: RemoteHost, num_engines: int) -> None:
        """Give a drained machine its engines back once an agent joins as this machine."""
        while True:
            await host.here.wait()
            while self._change is not None or self._fleet.ready is None:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            try:
                if num_engines:
                    await self._alone(self._grow([host] * num_engines))
                break
            except Conflict as cause:
                log.warning("%s is back, its engines are not: %s", host.name, cause)
                if not host.absent:
                    break  # POST /v1/admin/scale tries again
        self._is_back(host)

    def _on_return_failed(self, host: RemoteHost, name: str, error: Exception) -> None:
        log_error(name, error)
        self._is_back(host)  # without its engines: POST /v1/admin/scale adds them

    def _is_back(self, host: RemoteHost) -> None:
        del self._returning[host]
        del self._engines_before[host.number]
        self._save_snapshot()

    # ---- the place of the experts

    async def _rebalance(self, *, forced: bool) -> RebalanceDecision | None:
        experts = self._fleet.experts
        assert experts is not None
        placement = await experts.propose(force=forced)
        (group,) = self._fleet.groups
        if placement is None:
            return None
        began_s = time.monotonic()
        before = experts.rebalancer.moved_bytes
        error = await self._move(group, placement)
        decision = RebalanceDecision(
            at_s=began_s,
            forced=forced,
            version=placement.version,
            moved_bytes=experts.rebalancer.moved_bytes - before,
            took_s=time.monotonic() - began_s,
            error=error,
        )
        experts.decided(decision)
        outcome = error or f"active after {decision.took_s:.2f} s"
        log.info("placement %d: %s", placement.version, outcome)
        return decision

    async def _move(self, group: EngineGroup, placement: "Placement") -> str:
        """Make a placement the active one. Return why it is not, or ""."""
        experts = self._fleet.experts
        assert experts is not None
        try:
            if not group.complete:
                raise MoeserveError("the engines were not together")
            for rank in group.members:
                self._fleet.table.send(rank, UpdatePlacement(placement.to_table()))
            async with asyncio.timeout(MOVE_S):
                error = await experts.outcome()
        except TimeoutError:
            error = f"not all engines were done within {MOVE_S:g} s"
        except MoeserveError as cause:
            error = str(cause)
        else:
            self._set_placement(experts.table)  # all of it, or the layers that were done
            return error
        # Some may have begun: all meet again with the placement that was active.
        group.regroup(group.members, experts.table)
        return error


def _log_unexpected(name: str, error: Exception) -> None:
    """Log a failure that is a bug; the caller of a change gets the others."""
    if not isinstance(error, MoeserveError):
        log_error(name, error)
