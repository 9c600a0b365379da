"""Several engine processes behind one link: requests shared out among them, the group kept together over deaths.

An engine that dies takes nobody with it: its requests are handed back (RequestsLost), the others keep theirs, and a
new process joins them in the next epoch. With ep on all engines form one group and wait for each other; with ep off,
or for a model without experts, each is on its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from moeserve.actor.inbox import Inbox
from moeserve.actor.supervisor import RestartPolicy
from moeserve.cluster.check_parallel import check_parallel
from moeserve.cluster.engine_group import EngineGroup, MeetingPlace
from moeserve.cluster.engine_handle import EngineHandle
from moeserve.cluster.engine_process import INBOX_LIMIT
from moeserve.cluster.facts import combined, labelled, slowest
from moeserve.cluster.heartbeat import UNHEALTHY_S
from moeserve.cluster.interface import EngineGone, FromEngine, RequestsLost, Resized
from moeserve.cluster.order import Role
from moeserve.cluster.rendezvous import Rendezvous
from moeserve.cluster.rundir import RunDir
from moeserve.cluster.scaling import Scaling
from moeserve.cluster.traffic import Polls, Traffic
from moeserve.cluster.view import EngineView, FleetView
from moeserve.comm.world import World
from moeserve.config import Config
from moeserve.errors import ConfigError
from moeserve.loader.hf_config import read_model_spec
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.loader.spec import ModelSpec
from moeserve.messages import (
    Abort,
    AdminCall,
    AdminResult,
    Drain,
    EngineIn,
    EngineOut,
    ExpertLoad,
    Join,
    Joined,
    Parted,
    Phase,
    Ping,
    Place,
    Placed,
    PlacementTable,
    Ready,
    Refused,
    StepOutput,
    Submit,
    Traced,
    TraceNext,
)

if TYPE_CHECKING:
    from moeserve.cluster.rebalancing import Rebalancing

log = logging.getLogger(__name__)

POLICY = RestartPolicy(first_pause_s=0.05, proven_s=10.0)


class Fleet:
    """`EngineLink` to dp engines of tp processes each; see interface.py. options: those of `EngineProcess`.

    It is ready once all engines serve, and stays so while some of them are replaced. It ends when the group cannot be
    brought together again: an engine cannot be restarted, or the engines keep failing to meet.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        self.inbox: Inbox[FromEngine] = Inbox("front end", INBOX_LIMIT)
        self.phase = Phase("starting", 0, 0.0)
        self.ready: Ready | None = None
        self.engines: list[EngineHandle] = []
        self.groups: list[EngineGroup] = []
        self.experts: Rebalancing | None = None  # None: no experts, or each engine has all
        self.config = config
        self.traffic = Traffic(self._serving)
        self.scaling = Scaling(self)
        self._options = {"policy": POLICY} | options
        self._polls = Polls(self._tell)
        self._first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._run_dir: RunDir | None = None
        self._machines: Rendezvous | None = None
        self._place: MeetingPlace | None = None
        self._tasks: dict[asyncio.Task[None], EngineGroup | None] = {}
        self._draining: asyncio.TimerHandle | None = None  # goes off when no time is left
        self._late = False  # it did
        self._apart_s: float | None = None  # since when no engine serves
        self._over = False  # the final EngineGone was sent
        self._failure = ""  # its cause, if that was not an ordered stop

    async def start(self) -> None:
        assert self._run_dir is None, "a link is started once"
        parallel = self.config.parallel
        spec = self.spec = read_model_spec(resolve_model_dir(self.config.model.model))
        check_parallel(self.config, spec)
        if parallel.ep == "on" and spec.num_experts:
            self.experts = await asyncio.to_thread(self._deal_out, spec)
        self._run_dir = RunDir()
        machines = self._machines = await Rendezvous.open(self.config, self._run_dir.path)
        if parallel.fork_server == "on" and not self.config.device.null_runner:
            for host in machines.hosts:
                host.keep(parallel.tp)
        self._place = MeetingPlace(self._run_dir.path, count(1), parallel.tp, machines.address)
        self.engines = self.new_engines(range(parallel.dp), parallel.dp, self._table)
        self.add_groups([self.engines] if self.together else [[engine] for engine in self.engines])
        if self.experts is not None and parallel.rebalance == "auto":
            self._spawn(None, self.scaling.watch(), "rebalancing")

    def _deal_out(self, spec: ModelSpec) -> Rebalancing:
        from moeserve.cluster.rebalancing import Rebalancing  # here, because it needs numpy

        parallel = self.config.parallel
        return Rebalancing(sum(spec.moe_layers), spec.num_experts, parallel.num_ranks, parallel.redundant_experts)

    async def until_ready(self) -> Ready:
        return await asyncio.shield(self._first_ready)

    # ---- facts ----------------------------------------------------------------------------------------------

    @property
    def together(self) -> bool:
        """Whether the engines form one group."""
        return self.experts is not None

    @property
    def dp(self) -> int:
        return len(self.engines)

    @property
    def stalled_s(self) -> float:
        return max((engine.process.stalled_s for engine in self._serving()), default=0.0)

    @property
    def healthy(self) -> bool:
        """Some engines serve, and all that do make progress; a group that comes together again may take a moment."""
        if self.ready is None or self._over:
            return False
        serving = self._serving()
        if not serving:
            return self._apart_s is None or time.monotonic() - self._apart_s <= UNHEALTHY_S
        return all(engine.process.healthy for engine in serving)

    @property
    def view(self) -> FleetView:
        loads = self.traffic.balancer.loads
        engines = [
            EngineView(
                rank=engine.rank,
                host=engine.host,
                pid=engine.process.pid,
                state=engine.state,
                epoch=engine.epoch,
                restarts=engine.restarts,
                num_requests=len(engine.rids),
                predicted_work=loads[engine.rank].work if engine.rank in loads else 0.0,
                last=engine.last,
            )
            for engine in self.engines
        ]
        return FleetView(
            dp=self.dp,
            tp=self.config.parallel.tp,
            together=self.together,
            epoch=max((group.epoch for group in self.groups), default=0),
            complete=all(group.complete for group in self.groups),
            waiting=self.traffic.num_waiting,
            engines=tuple(engines),
            experts=self.experts.view() if self.experts is not None else None,
        )

    @property
    def fork_server_pid(self) -> int | None:
        """Of the process on this machine that engines are forked from, if it is warm."""
        server = self._machines.forks.server if self._machines is not None else None
        return server.child.pid if server is not None else None

    @property
    def _table(self) -> PlacementTable | None:
        return self.experts.table if self.experts is not None else None

    def _serving(self) -> list[EngineHandle]:
        """Those that may get requests."""
        known = self.traffic.balancer.loads  # an engine that has joined is opened there a moment later
        together = [engine for group in self.groups if group.complete for engine in group.engines]
        return [engine for engine in together if engine.up and not engine.draining and engine.rank in known]

    # ---- from the front end ---------------------------------------------------------------------------------

    def send(self, msg: EngineIn) -> None:
        match msg:
            case Submit():
                self.traffic.submit(msg)
            case Abort(rids=rids):
                self.traffic.abort(rids)
            case AdminCall():
                self._polls.ask(msg, [engine for engine in self.engines if engine.up])
            case Drain(deadline_s=deadline_s):
                # The engines learn of it at the deadline: one that dies before needs the others, also the idle ones.
                self._draining = asyncio.get_running_loop().call_later(deadline_s, self._drain)
            case TraceNext():
                for group in self.groups:
                    if group.complete:
                        group.engines[0].process.send(msg)  # one vote is enough for all
            case Ping() | Join() | Place():
                raise ValueError(f"a fleet sends {type(msg).__name__} itself")
            case _:
                assert_never(msg)

    async def stop(self, deadline_s: float) -> None:
        failure = self._failure
        if self._run_dir is None:
            return
        if self._draining is not None:
            self._draining.cancel()
        await self.scaling.stop()
        await asyncio.gather(*(engine.stop(deadline_s) for engine in self.engines))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(EngineGone(exit_code=0, cause="stopped"))
        if self._machines is not None:
            await self._machines.close(failure)
        self._run_dir.close()

    def _drain(self) -> None:
        """Ends what still runs. Engines that do not serve yet are told once they do: requests may wait for them."""
        self._late = True
        for engine in self._serving():
            engine.drain(0.0)

    # ---- engines come and go --------------------------------------------------------------------------------

    def new_engines(self, ranks: Iterable[int], dp: int, table: PlacementTable | None) -> list[EngineHandle]:
        """Starts engines that belong to no group yet."""
        assert self._machines is not None
        hosts = self._machines.hosts
        engines = [EngineHandle(self, rank, self._role(rank, dp, table), self.config, self._options) for rank in ranks]
        for engine in engines:
            engine.start(hosts[engine.rank * len(hosts) // dp])
        return engines

    def add_groups(self, groups: Iterable[list[EngineHandle]]) -> None:
        assert self._place is not None
        alone = not self.together and self.config.parallel.tp == 1
        for engines in groups:
            group = EngineGroup(
                engines, self._place, placement=self._table, alone=alone, met=self._on_met, hopeless=self._on_hopeless
            )
            self.groups.append(group)
            self._spawn(group, group.run(), f"engine group of {engines[0].process.name}")

    def drop_group(self, group: EngineGroup) -> None:
        self.groups.remove(group)
        group.close()
        for task, owner in self._tasks.items():
            if owner is group:
                task.cancel()

    def settle(self, placement: PlacementTable | None) -> None:
        """Engines that are started from now on are told of this membership and placement."""
        for engine in self.engines:
            engine.role = self._role(engine.rank, self.dp, placement)
        for group in self.groups:
            group.placement = placement

    def hand_back(self, engine: EngineHandle, *, died: bool, cause: str) -> None:
        """Its requests are the front end's again."""
        rids = self.traffic.lost(engine)
        if rids or died:
            self._tell(RequestsLost(rids=rids, engine=engine.rank, died=died, cause=cause))

    def _role(self, rank: int, dp: int, table: PlacementTable | None) -> Role:
        tp = self.config.parallel.tp
        here = dp * tp // self.config.parallel.nnodes
        if self.together:
            world = World(rank=rank * tp, size=dp * tp, tp_size=tp, ranks_on_host=here)
        else:
            world = World(size=tp, tp_size=tp, ep=False, ranks_on_host=here)
        return Role(world=world, grouped=self.together or tp > 1, placement=table)

    def announce(self) -> None:
        """Tells the front end what there is, if that is news."""
        present = [engine.process.ready for engine in self.engines if engine.process.ready is not None]
        if not present:
            return  # all are being replaced; the next meeting has the news
        try:
            facts = combined(present)
        except ConfigError as error:
            self._end(EngineGone(exit_code=error.exit_code, cause=str(error)))
            return
        known, self.ready = self.ready, facts
        if known is None:
            self._tell(facts)
            self._first_ready.set_result(facts)
        elif known != facts:
            self._tell(Resized(facts))

    def _on_met(self, group: EngineGroup) -> None:
        if not group.complete:
            return  # lost again, or regrouped
        self._apart_s = None
        if self.experts is not None:
            facts = group.engines[0].process.ready
            self.experts.joined(group.placement, facts.expert_bytes if facts is not None else 0)
        for engine in group.engines:
            assert engine.process.ready is not None
            self.traffic.balancer.open(engine.rank, engine.process.ready)
        complete = all(other.complete for other in self.groups)
        if self.ready is not None or complete:
            self.announce()
        self.traffic.flush()
        if self._late:
            self._drain()

    def _on_hopeless(self, cause: str, exit_code: int) -> None:
        self._end(EngineGone(exit_code=exit_code, cause=cause))

    # ---- from the engines -----------------------------------------------------------------------------------

    async def hear(self, engine: EngineHandle, msg: EngineOut) -> None:
        await self.inbox.room()
        if engine.retired:
            return  # its requests have gone elsewhere, maybe while this one waited for room
        match msg:
            case StepOutput():
                self.traffic.note(engine, msg)
                msg = labelled(msg, engine.rank)
            case Refused():
                self.traffic.end(msg.rid)
                if msg.code == "server_draining" and not self._late:  # somebody sent it a SIGTERM
                    engine.draining = True
                    self._tell(RequestsLost(rids=(msg.rid,), engine=engine.rank, died=False, cause=msg.message))
                    return
            case Traced():
                msg = labelled(msg, engine.rank)
            case ExpertLoad() if self.experts is None:
                pass  # nothing to place: the front end only adds it up
            case _:
                self._on_news(engine, msg)
                return
        if not self.inbox.closed:
            self.inbox.put(msg)

    def _on_news(self, engine: EngineHandle, msg: EngineOut) -> None:
        """What the front end need not know."""
        match msg:
            case Phase():
                self._on_phase()
            case AdminResult():
                self._polls.answered(engine, msg)
            case Ready() | Joined() | Parted():
                self._on_standing(engine)
            case ExpertLoad() if self.experts is not None:
                self.experts.note(msg)
            case Placed() if self.experts is not None:
                self.experts.placed(msg)

    def _on_phase(self) -> None:
        phase = slowest([engine.process.phase for engine in self.engines])
        if phase != self.phase and (self.ready is None or not self._serving()):
            self.phase = phase
            self._tell(phase)

    def _on_standing(self, engine: EngineHandle) -> None:
        if self._apart_s is None and not self._serving():
            self._apart_s = time.monotonic()
        for group in self.groups:
            group.poke()

    def lost(self, engine: EngineHandle) -> None:
        if not engine.retired:
            self.hand_back(engine, died=not engine.obeyed, cause="it ended")
        self._on_standing(engine)

    def gone(self, engine: EngineHandle, end: EngineGone) -> None:
        self._polls.lost(engine)
        self._on_standing(engine)
        if end.restarting or engine.retired or engine not in self.engines:
            return
        name = engine.process.name
        if all(other.end is not None for other in self.engines):
            self._end(end)
        elif end.exit_code == 0 and engine.obeyed:
            self._dissolve(engine)
        elif self.together or not self.ready:
            cause = end.cause if end.cause.startswith(name) else f"{name}: {end.cause}"
            self._end(msgspec.structs.replace(end, cause=cause))
        else:
            log.error("%s is not started again; %d engines go on", name, len(self._serving()))

    def _dissolve(self, engine: EngineHandle) -> None:
        """It ended as told, so its group has nothing left to do: nobody waits for it to meet again."""
        for group in self.groups:
            if engine in group.engines:
                for other in group.engines:
                    if not other.up and other.end is None:
                        self._spawn(None, other.stop(0.0), f"end of {other.process.name}")

    # ---- endings --------------------------------------------------------------------------------------------

    def _tell(self, msg: FromEngine) -> None:
        if not self.inbox.closed:
            self.inbox.put(msg, force=True)

    def _end(self, gone: EngineGone) -> None:
        """The last notice."""
        if self._over:
            return
        self._over, self.ready = True, None
        self._failure = gone.cause if gone.exit_code else ""
        self._tell(gone)
        if not self._first_ready.done():
            self._first_ready.set_exception(gone.error())
            self._first_ready.exception()  # nobody has to await it

    def _spawn(self, owner: EngineGroup | None, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = owner
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:  # a fault of ours
            log.error("%s failed", task.get_name(), exc_info=error)
            self._end(EngineGone(exit_code=1, cause=f"{task.get_name()} failed: {error!r}"))
