"""The engines of a fleet: how they start, and how they change while it serves: more, fewer,
elsewhere.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from moeserve.cluster.assignment import at_start, equal_shares, spread
from moeserve.cluster.check_parallel import check_parallel, check_scale
from moeserve.cluster.engine_group import JOIN_S, EngineGroup, combined
from moeserve.cluster.engine_handle import EngineHandle
from moeserve.cluster.host import Host, RemoteHost, RootHost, Standing
from moeserve.cluster.order import Role, role_of
from moeserve.cluster.rendezvous import Rendezvous
from moeserve.cluster.rundir import RunDir
from moeserve.cluster.view import RebalanceDecision
from moeserve.errors import ConfigError, Conflict, InvalidRequest, MoeserveError
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import Place, PlacementTable
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from moeserve.cluster.fleet import Fleet
    from moeserve.cluster.rebalancing import Rebalancing
    from moeserve.moe.placement.placement import Placement

log = logging.getLogger(__name__)

BOOT_S = 1800.0  # for new engines to load; one that shows no progress is given up long before
MOVE_S = 600.0  # for a placement to be prepared and put in force
CHECK_S = 5.0  # between two looks at the load
LOOK_S = 1.0  # between two looks at machines whose engines load
VERSIONS = (
    1 << 16
)  # numbers for the placements of one front end: those of the next one are above them

T = TypeVar("T")


class Scaling:
    """Starts a fleet's engines, and changes them; each change is done, or undone with its cause in
    the error, before the next one begins. options: those of `EngineProcess`."""

    def __init__(self, fleet: "Fleet", **options: Any) -> None:
        self._fleet = fleet
        self._options = options
        self.machines: Rendezvous  # from `start` on
        self._run_dir: RunDir
        self._spec: ModelSpec
        self._watching: asyncio.Task[None] | None = None
        self._at_work: asyncio.Task[Any] | None = None
        self.drained: dict[
            Host, asyncio.Task[None]
        ] = {}  # machines, and what waits for their return
        self._had: dict[int, int] = {}  # engines of drained machines
        self.standing: Standing | None = None  # where the front end before this one has left it

    # ---- the first ones, and the last
    # -----------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all engines. Raises ConfigError for settings that cannot work."""
        fleet = self._fleet
        parallel = self._fleet.config.parallel
        spec = self._spec = read_model_spec(resolve_model_dir(fleet.config.model.model))
        check_parallel(fleet.config, spec)
        standing = self.standing or Standing(dict(enumerate(at_start(parallel))), {}, None)
        if parallel.ep == "on" and spec.num_experts and not fleet.single:
            fleet.experts = await asyncio.to_thread(self._shard_experts, standing)
        self._run_dir = RunDir()
        try:
            self.machines = await Rendezvous.open(fleet.config, self._run_dir.path, fleet.root)
        except BaseException:
            self._run_dir.close()
            raise
        table = fleet.experts.table if fleet.experts is not None else None
        hosts = self.machines.hosts
        engines = fleet.engines = [
            self._new(rank, hosts[machine]) for rank, machine in standing.engines.items()
        ]
        for engine in engines:
            engine.start(self._role_of(engine, engines, table))
        self._add_groups([engines] if fleet.together else [[engine] for engine in engines], table)
        if fleet.experts is not None and parallel.rebalance == "auto":
            self._watching = asyncio.get_running_loop().create_task(
                self.watch(), name="rebalancing"
            )
        for machine, had in standing.drained.items():
            self._await_return(hosts[machine], had)

    def _shard_experts(self, standing: Standing) -> "Rebalancing":
        from moeserve.cluster.rebalancing import Rebalancing  # here, because it needs numpy
        from moeserve.moe.placement.placement import Placement

        parallel = self._fleet.config.parallel
        root = self._fleet.root
        experts = Rebalancing.of(self._spec, parallel, list(standing.engines.values()))
        if (
            root is not None
        ):  # engines that have served another front end know its placements by their versions
            kept = standing.placement
            first = experts.rebalancer.current if kept is None else Placement.from_table(kept)
            experts.rebalancer.joined(replace(first, version=root.made_at * VERSIONS))
        return experts

    def _new(self, rank: int, host: Host) -> EngineHandle:
        return EngineHandle(self._fleet, rank, host, self._fleet.config, **self._options)

    def _role_of(
        self, engine: EngineHandle, engines: Sequence[EngineHandle], table: PlacementTable | None
    ) -> Role:
        fleet = self._fleet
        machines = [other.host.number for other in engines]
        return role_of(
            fleet.config.parallel, fleet.together, engines.index(engine), machines, table
        )

    def _add_groups(
        self, groups: Iterable[list[EngineHandle]], table: PlacementTable | None
    ) -> None:
        """Lets each of these lists of engines meet as a group."""
        fleet = self._fleet
        tell = partial(self._fleet.inbox.put, force=True)
        alone = not fleet.together and fleet.config.parallel.tp == 1
        fleet.groups += [
            EngineGroup(engines, self.machines, placement=table, alone=alone, tell=tell)
            for engines in groups
        ]

    def _set_placement(self, placement: PlacementTable | None) -> None:
        """Tells this membership and placement to engines that are started from now on."""
        fleet = self._fleet
        for engine in fleet.engines:
            engine.role = self._role_of(engine, fleet.engines, placement)
        for group in fleet.groups:
            group.placement = placement
        self._keep()

    def _keep(self) -> None:
        """Tells the root process, if there is one, what the next front end is to begin with."""
        fleet = self._fleet
        root = self.machines.hosts[0]
        if isinstance(root, RootHost):
            engines = {engine.rank: engine.host.number for engine in fleet.engines}
            root.tell(Standing(engines, self._had, fleet.groups[0].placement))

    async def close(self, cause: str) -> None:
        """Releases groups and machines, once the engines have ended. cause: why the fleet fails,
        empty if it stops.
        """
        for group in self._fleet.groups:
            await group.close()
        await self.machines.close(cause)
        self._run_dir.close()

    # ---- one change at a time
    # -------------------------------------------------------------------------------

    async def scale(self, dp: int) -> int:
        """Changes the number of engines to `dp` while requests go on; returns how many there were
        before.

        Raises InvalidRequest for a number that cannot work, Conflict if another change is under way
        or this one was undone.
        """
        if not isinstance(dp, int) or not 1 <= dp <= 1024:
            raise InvalidRequest(f"dp must be from 1 to 1024, not {dp}", param="dp")
        try:
            check_scale(self._fleet.config, self._spec, dp)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="dp") from error
        return await self._alone(self._scale(dp))

    async def drain(self, machine: int) -> int:
        """Takes a machine out of service, also one that is lost; returns how many engines there
        were before.

        Its requests and experts go to the other machines, then its agent is let go. If an agent
        joins as this machine later, it gets as many engines again. Raises InvalidRequest and
        Conflict.
        """
        hosts = self.machines.hosts
        if not 0 < machine < len(hosts):
            why = (
                "it answers HTTP and keeps the requests"
                if machine == 0
                else f"there are {len(hosts)} machines"
            )
            raise InvalidRequest(f"machine {machine} cannot be drained: {why}", param="machine")
        return await self._alone(self._drain(hosts[machine]))

    async def rebalance(self) -> RebalanceDecision | None:
        """Moves experts to fit the load so far, even if that does not pay; returns None if they fit
        already.

        Raises Conflict if this fleet has no experts to move or another change is under way.
        """
        if self._fleet.experts is None:
            raise Conflict("there are no experts to move: the model is dense, or --ep is off")
        return await self._alone(self._rebalance(forced=True))

    async def watch(self) -> None:
        """Rebalances whenever that pays; never returns."""
        while True:
            await asyncio.sleep(CHECK_S)
            if (
                self._at_work is None
                and self._fleet.ready is not None
                and self._fleet.groups[0].complete
            ):
                try:
                    await self._alone(self._rebalance(forced=False))
                except Conflict as cause:
                    log.info("experts stay where they are: %s", cause)
                except Exception:  # uneven experts are no reason to stop serving
                    log.exception("rebalancing failed; the experts stay where they are")

    async def stop(self) -> None:
        """Cancels the change that is under way, and lets no other follow by itself."""
        for task in (self._watching, *self.drained.values(), self._at_work):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    async def _alone(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs one change at a time, to its end even if the caller is cancelled."""
        if self._at_work is not None or self._fleet.ready is None:
            work.close()
            raise Conflict(
                "another change is under way" if self._at_work else "the engines are not ready"
            )
        task = self._at_work = asyncio.get_running_loop().create_task(work, name="scaling")
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Conflict("the server is stopping") from None
            raise

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._at_work = None
        if not task.cancelled():
            task.exception()  # its caller may have left

    # ---- how many
    # -------------------------------------------------------------------------------------------

    async def _scale(self, dp: int) -> int:
        engines = self._fleet.engines
        before = self._fleet.dp
        stay = sorted(engine.rank for engine in engines)[:dp]
        if dp > before:
            here = Counter(engine.host.number for engine in engines)
            machines = {
                host.number: here[host.number] for host in self.machines.hosts if not host.absent
            }
            await self._grow(
                [self.machines.hosts[number] for number in spread(dp - before, machines)]
            )
        elif dp < before:
            await self._shrink(
                [engine for engine in engines if engine.rank in stay], f"only {dp} shall serve"
            )
        return before

    def _rescaled(self, engines: Sequence[EngineHandle]) -> PlacementTable | None:
        """Returns the placement for these engines instead of the present ones."""
        experts = self._fleet.experts
        old = self._fleet.engines
        tp = self._fleet.config.parallel.tp
        if experts is None:
            return None
        starts = [old.index(engine) * tp if engine in old else None for engine in engines]
        was = [-1 if start is None else start + rank for start in starts for rank in range(tp)]
        return experts.rescaled(
            was, equal_shares([engine.host.number for engine in engines])
        ).to_table()

    async def _grow(self, hosts: Sequence[Host]) -> None:
        """Adds an engine on each of these machines; they load while the others serve, then all
        meet.
        """
        fleet = self._fleet
        old = self._fleet.engines
        missing = [engine.host for engine in old if engine.host.absent]
        if fleet.together and missing:
            raise Conflict(f"{missing[0].name} is missing; start it again, or drain it")
        taken = {engine.rank for engine in old}
        free = (rank for rank in count() if rank not in taken)
        new = [self._new(next(free), host) for host in hosts]
        engines = sorted([*old, *new], key=lambda engine: (engine.host.number, engine.rank))
        table = await asyncio.to_thread(self._rescaled, engines)
        for engine in new:
            engine.start(self._role_of(engine, engines, table))
        try:
            await self._boot(new)
            if table is not None:
                await self._meet(engines, table)
            else:
                fleet.engines = engines
                self._add_groups(([engine] for engine in new), None)
                self._set_placement(None)
        except BaseException as error:
            for engine in new:
                engine.retired = True
            await asyncio.gather(*(engine.close(0.0) for engine in new))
            if isinstance(error, MoeserveError):
                raise Conflict(
                    f"{len(old)} engines go on, {len(engines)} could not be made to: {error}"
                ) from error
            raise
        self._settle(len(old))

    def _settle(self, before: int) -> None:
        self._fleet.announce()
        self._fleet.traffic.flush()
        log.info("%d engines serve; there were %d", self._fleet.dp, before)

    async def _boot(self, new: list[EngineHandle]) -> None:
        """Returns once the new engines are up. Raises what keeps one of them from serving."""
        loading = asyncio.gather(*(asyncio.shield(engine.first_ready) for engine in new))
        began_s = time.monotonic()
        while not (await asyncio.wait([loading], timeout=LOOK_S))[0]:
            late = [engine for engine in new if not engine.up]
            lost = [engine.host.name for engine in late if engine.host.absent]
            if lost or time.monotonic() - began_s > BOOT_S:
                loading.cancel()
                why = f"{lost[0]} was lost" if lost else f"they did not load within {BOOT_S:g} s"
                raise ConfigError(f"{', '.join(engine.name for engine in late)}: {why}")
        combined(
            [
                *(engine.ready for engine in self._fleet.engines if engine.ready is not None),
                *loading.result(),
            ]
        )

    async def _meet(self, engines: list[EngineHandle], table: PlacementTable) -> None:
        """Makes these engines the group. Raises Conflict with the cause if the group stays as it
        was.
        """
        fleet, (group,) = self._fleet, self._fleet.groups
        assert fleet.experts is not None
        old = fleet.engines
        old_table = fleet.experts.table
        fleet.engines = engines
        outcome = group.regroup(engines, table)
        await asyncio.wait([outcome], timeout=JOIN_S)  # an old one may be lost meanwhile
        cause = outcome.result() if outcome.done() else f"not all were there within {JOIN_S:g} s"
        if cause:
            fleet.engines = old
            group.regroup(old, old_table)
            raise Conflict(cause)
        self._set_placement(table)

    async def _shrink(self, stay: list[EngineHandle], cause: str) -> None:
        """Removes the other engines: their requests are handed back at once, and those that stay
        meet without them.
        """
        fleet = self._fleet
        before = self._fleet.dp
        if all(engine.end is not None for engine in stay):
            raise Conflict("the engines that would stay are gone for good; start the server anew")
        leave = [engine for engine in fleet.engines if engine not in stay]
        table = await asyncio.to_thread(self._rescaled, stay)
        fleet.engines = stay
        for engine in leave:
            engine.retired = True
        for group in [group for group in fleet.groups if group.engines[0] in leave]:
            fleet.groups.remove(group)
            await group.close()
        self._set_placement(table)
        for engine in leave:
            fleet.hand_back(engine, died=False, cause=cause)
        # By vote, some engines hold and the others end between the same two steps.
        ending = asyncio.gather(*(engine.close(0.0) for engine in leave))
        try:
            if table is not None:
                # If it fails, the next meeting has the same engines; nor can it be while another
                # machine is lost.
                meeting = fleet.groups[0].regroup(stay, table)
                await asyncio.wait(
                    [meeting], timeout=JOIN_S if all(engine.up for engine in stay) else 0.0
                )
        finally:
            await ending
        self._settle(before)

    # ---- a machine that leaves, and comes back
    # --------------------------------------------------------------

    async def _drain(self, host: Host) -> int:
        engines = self._fleet.engines
        stay = [engine for engine in engines if engine.host is not host]
        had = len(engines) - len(stay)
        assert isinstance(host, RemoteHost)
        if host in self.drained:
            raise Conflict(f"{host.name} is drained already")
        try:
            check_scale(self._fleet.config, self._spec, len(stay))
        except ConfigError as error:
            raise Conflict(f"{host.name} cannot be drained: {error}") from error
        if had:
            await self._shrink(stay, f"{host.name} is drained")
        await host.close("")
        self._await_return(host, had)
        self._keep()
        return len(engines)

    def _await_return(self, host: Host, had: int) -> None:
        assert isinstance(host, RemoteHost)
        self._had[host.number] = had
        self.drained[host] = asyncio.get_running_loop().create_task(
            self._take_back(host, had), name=host.name
        )

    async def _take_back(self, host: RemoteHost, had: int) -> None:
        """Gives a drained machine its engines back once an agent joins as this machine."""
        while True:
            await host.here.wait()
            while self._at_work is not None or self._fleet.ready is None:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            try:
                if had:
                    await self._alone(self._grow([host] * had))
                break
            except Conflict as cause:
                log.warning("%s is back, its engines are not: %s", host.name, cause)
                if not host.absent:
                    break  # POST /v1/admin/scale tries again
        del self.drained[host], self._had[host.number]
        self._keep()

    # ---- where the experts are
    # ------------------------------------------------------------------------------

    async def _rebalance(self, *, forced: bool) -> RebalanceDecision | None:
        fleet = self._fleet
        experts = self._fleet.experts
        assert experts is not None
        placement = await experts.propose(force=forced)
        (group,) = fleet.groups
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
        log.info(
            "placement %d: %s",
            placement.version,
            error or f"in force after {decision.took_s:.2f} s",
        )
        return decision

    async def _move(self, group: EngineGroup, placement: "Placement") -> str:
        """Puts a placement in force; returns why it is not, or ""."""
        experts = self._fleet.experts
        engines = group.engines
        assert experts is not None
        try:
            if not group.complete:
                raise MoeserveError("the engines were not together")
            for engine in engines:
                engine.send(Place(placement.to_table()))
            async with asyncio.timeout(MOVE_S):
                error = await experts.outcome()
        except TimeoutError:
            error = f"not all engines were done within {MOVE_S:g} s"
        except MoeserveError as cause:
            error = str(cause)
        else:
            self._set_placement(experts.table)  # all of it, or the layers that were done
            return error
        group.regroup(engines, experts.table)  # some may have begun: all meet again where they were
        return error
