"""The engine processes behind one link: balances requests over them and keeps their group together over deaths.

The requests of an engine that dies are handed back (RequestsLost; with a single engine EngineGone says so), the other
engines keep theirs, and a new process joins them in the next epoch. With ep on all engines form one group and compute
in lockstep; with ep off, or for a model without experts, each is on its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from moeserve.actor.actor import Actor
from moeserve.actor.inbox import Inbox
from moeserve.actor.supervisor import RestartPolicy
from moeserve.cluster.balance import Polls, Traffic
from moeserve.cluster.check_parallel import check_parallel
from moeserve.cluster.engine_group import EngineGroup, GroupFailed, GroupMet, MeetingPlace, combined, labelled
from moeserve.cluster.engine_handle import EngineEnded, EngineHandle, EngineLost, EngineSaid, ForFleet
from moeserve.cluster.heartbeat import UNHEALTHY_S
from moeserve.cluster.link import INBOX_LIMIT, EngineGone, FromEngine, RequestsLost, Resized
from moeserve.cluster.order import role_of
from moeserve.cluster.rendezvous import Rendezvous
from moeserve.cluster.rundir import RunDir
from moeserve.cluster.scaling import Scaling
from moeserve.cluster.view import FleetView
from moeserve.config import Config
from moeserve.errors import ConfigError
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.loader.spec import ModelSpec
from moeserve.messages import (
    Abort,
    AdminCall,
    AdminResult,
    Drain,
    EngineIn,
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
    Stopped,
    Submit,
    Traced,
    TraceNext,
)
from moeserve.models.hf_config import read_model_spec

if TYPE_CHECKING:
    from moeserve.cluster.rebalancing import Rebalancing

log = logging.getLogger(__name__)

POLICY = RestartPolicy(first_pause_s=0.05, proven_s=10.0)


class Finish:
    """The fleet's last message, once all engines have ended."""


class Fleet(Actor[EngineSaid | EngineLost | EngineEnded | GroupMet | GroupFailed | Finish]):
    """`EngineLink` to dp engines of tp processes each; see link.py. options: those of `EngineHandle`.

    A fleet is ready once all engines serve, and stays so while some of them are replaced. It ends when the group cannot
    be brought together again: an engine cannot be restarted, or the engines keep failing to meet. A single engine of
    one process has no others that could take over: the front end is told of its end instead.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__("fleet")
        self.single = config.parallel.num_ranks == 1
        self.outbox: Inbox[FromEngine] = Inbox("front end", INBOX_LIMIT)
        self.phase = Phase("starting", 0, 0.0)
        self.ready: Ready | None = None
        self.engines: list[EngineHandle] = []
        self.groups: list[EngineGroup] = []
        self.experts: Rebalancing | None = None  # None: no experts, or each engine has all
        self.config = config
        self.traffic = Traffic(self._serving)
        self.scaling = Scaling(self)
        self._options = ({} if self.single else {"policy": POLICY}) | options
        self._polls = Polls(self._emit)
        self._run_dir: RunDir | None = None
        self._life: asyncio.Task[None] | None = None
        self._machines: Rendezvous | None = None
        self._place: MeetingPlace | None = None
        self._tasks: dict[asyncio.Task[None], EngineGroup | None] = {}
        self._draining: asyncio.TimerHandle | None = None  # goes off when no time is left
        self._late = False  # it did
        self._apart_s: float | None = None  # since when no engine serves
        self._over = False  # the final EngineGone was sent
        self._failure = ""  # its cause, if that was not an ordered stop

    async def start(self) -> None:
        """Starts all engines and returns before they are ready. Raises ConfigError for settings that cannot work."""
        assert self._run_dir is None, "a link is started once"
        parallel = self.config.parallel
        spec = self.spec = read_model_spec(resolve_model_dir(self.config.model.model))
        check_parallel(self.config, spec)
        if parallel.ep == "on" and spec.num_experts and not self.single:
            self.experts = await asyncio.to_thread(self._shard_experts, spec)
        self._run_dir = RunDir()
        machines = self._machines = await Rendezvous.open(self.config, self._run_dir.path)
        if parallel.fork_server == "on" and not self.single and not self.config.device.null_runner:
            for host in machines.hosts:
                host.keep(parallel.tp)
        self._place = MeetingPlace(self._run_dir.path, count(1), parallel.tp, machines.address)
        self._life = self._spawn(None, self.run(), "fleet")
        self.engines = self.new_engines(range(parallel.dp), parallel.dp, self._table)
        self.add_groups([self.engines] if self.together else [[engine] for engine in self.engines])
        if self.experts is not None and parallel.rebalance == "auto":
            self._spawn(None, self.scaling.watch(), "rebalancing")

    def _shard_experts(self, spec: ModelSpec) -> Rebalancing:
        from moeserve.cluster.rebalancing import Rebalancing  # here, because it needs numpy

        parallel = self.config.parallel
        return Rebalancing(sum(spec.moe_layers), spec.num_experts, parallel.num_ranks, parallel.redundant_experts)

    @property
    def together(self) -> bool:
        """Whether the engines form one group."""
        return self.experts is not None

    @property
    def dp(self) -> int:
        """Number of engines."""
        return len(self.engines)

    @property
    def stalled_s(self) -> float:
        """The longest `EngineHandle.stalled_s` of the engines that serve."""
        return max((engine.stalled_s for engine in self._serving()), default=0.0)

    @property
    def healthy(self) -> bool:
        """Whether some engines serve, and all that do make progress; a group may take a moment to meet again."""
        if self.ready is None or self._over:
            return False
        serving = self._serving()
        if not serving:
            return self._apart_s is None or time.monotonic() - self._apart_s <= UNHEALTHY_S
        return all(engine.healthy for engine in serving)

    @property
    def view(self) -> FleetView:
        """A snapshot of the fleet."""
        loads = self.traffic.balancer.loads
        return FleetView(
            dp=self.dp,
            tp=self.config.parallel.tp,
            together=self.together,
            epoch=max((group.epoch for group in self.groups), default=0),
            complete=all(group.complete for group in self.groups),
            waiting=self.traffic.num_waiting,
            engines=tuple(engine.view(loads.get(engine.rank)) for engine in self.engines),
            experts=self.experts.view() if self.experts is not None else None,
        )

    @property
    def fork_server_pid(self) -> int | None:
        """Process id of this machine's fork server, if it is warm."""
        server = self._machines.forks.server if self._machines is not None else None
        return server.child.pid if server is not None else None

    @property
    def _table(self) -> PlacementTable | None:
        return self.experts.table if self.experts is not None else None

    def _serving(self) -> list[EngineHandle]:
        """Returns the engines that may get requests."""
        known = self.traffic.balancer.loads  # an engine that has joined is opened there a moment later
        together = [engine for group in self.groups if group.complete for engine in group.engines]
        return [engine for engine in together if engine.up and not engine.draining and engine.rank in known]

    def send(self, msg: EngineIn) -> None:
        """Sends a message to the engine or the engines that it concerns. Raises Overloaded if one does not keep up."""
        match msg:
            case Submit():
                self.traffic.submit(msg)
            case Abort(rids=rids):
                self.traffic.abort(rids)
            case AdminCall():
                self._polls.ask(msg, [engine for engine in self.engines if engine.up])
            case Drain(deadline_s=deadline_s) if self.single:
                self.engines[0].drain(deadline_s)
            case Drain(deadline_s=deadline_s):
                # The engines learn of it at the deadline: one that dies before needs the others, also the idle ones.
                self._draining = asyncio.get_running_loop().call_later(deadline_s, self._drain)
            case TraceNext():
                for group in self.groups:
                    if group.complete:
                        group.engines[0].send(msg)  # one vote is enough for all
            case Ping() | Join() | Place():
                raise ValueError(f"a fleet sends {type(msg).__name__} itself")
            case _:
                assert_never(msg)

    async def close(self, deadline_s: float) -> None:
        """Lets running requests finish for up to `deadline_s`, then ends all engines. May be called again."""
        failure = self._failure
        if self._run_dir is None:
            return
        if self._draining is not None:
            self._draining.cancel()
        await self.scaling.stop()
        await asyncio.gather(*(engine.close(deadline_s) for engine in self.engines))
        if self._life is not None and not self._life.done():
            self.inbox.put(Finish(), force=True)
            await asyncio.wait([self._life])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(EngineGone(exit_code=0, cause="stopped"))
        if self._machines is not None:
            await self._machines.close(failure)
        self._run_dir.close()

    def _drain(self) -> None:
        """Ends the running requests. Engines that do not serve yet are told later: requests may wait for them."""
        self._late = True
        for engine in self._serving():
            engine.drain(0.0)

    def new_engines(self, ranks: Iterable[int], dp: int, table: PlacementTable | None) -> list[EngineHandle]:
        """Starts engines, which belong to no group yet."""
        assert self._machines is not None
        hosts, engines = self._machines.hosts, []
        for rank in ranks:
            role = role_of(self.config.parallel, self.together, rank, dp, table)
            engines.append(EngineHandle(self, rank, role, self.config, **self._options))
            engines[-1].start(hosts[rank * len(hosts) // dp])
        return engines

    def add_groups(self, groups: Iterable[list[EngineHandle]]) -> None:
        """Lets each of these lists of engines meet as a group."""
        assert self._place is not None
        alone = not self.together and self.config.parallel.tp == 1
        for engines in groups:
            group = EngineGroup(
                engines, self._place, placement=self._table, alone=alone, tell=partial(self.inbox.put, force=True)
            )
            self.groups.append(group)
            self._spawn(group, group.run(), f"engine group of {engines[0].name}")

    def drop_group(self, group: EngineGroup) -> None:
        """Ends a group, not its engines."""
        self.groups.remove(group)
        group.close()
        for task, owner in self._tasks.items():
            if owner is group:
                task.cancel()

    def set_placement(self, placement: PlacementTable | None) -> None:
        """Tells this membership and placement to engines that are started from now on."""
        for engine in self.engines:
            engine.role = role_of(self.config.parallel, self.together, engine.rank, self.dp, placement)
        for group in self.groups:
            group.placement = placement

    def hand_back(self, engine: EngineHandle, *, died: bool, cause: str) -> None:
        """Returns an engine's requests to the front end."""
        rids = self.traffic.lost(engine)
        if (rids or died) and not self.single:
            self._emit(RequestsLost(rids=rids, engine=engine.rank, died=died, cause=cause))

    def announce(self) -> None:
        """Tells the front end the facts of all engines together, if they have changed."""
        present = [engine.ready for engine in self.engines if engine.ready is not None]
        if not present:
            return  # all are being replaced; the next meeting has the news
        try:
            facts = combined(present)
        except ConfigError as error:
            self._end(EngineGone(exit_code=error.exit_code, cause=str(error)))
            return
        known, self.ready = self.ready, facts
        if known is None:
            self._emit(facts)
        elif known != facts:
            self._emit(Resized(facts))

    def _on_met(self, group: EngineGroup) -> None:
        if not group.complete:
            return  # lost again, or regrouped
        self._apart_s = None
        if self.experts is not None:
            facts = group.engines[0].ready
            self.experts.joined(group.placement, facts.expert_bytes if facts is not None else 0)
        for engine in group.engines:
            assert engine.ready is not None
            self.traffic.balancer.open(engine.rank, engine.ready)
        if self.ready is not None or all(other.complete for other in self.groups):
            self.announce()
        self.traffic.flush()
        if self._late:
            self._drain()

    def handle(self, msg: EngineSaid | EngineLost | EngineEnded | GroupMet | GroupFailed | Finish) -> None:
        """Acts on news of an engine or a group."""
        match msg:
            case EngineSaid(engine, said):
                if not engine.retired:  # its requests have gone elsewhere
                    self._on_said(engine, said)
            case EngineLost(engine):
                self._on_lost(engine)
            case EngineEnded(engine, end):
                self._on_ended(engine, end)
            case GroupMet(group):
                self._on_met(group)
            case GroupFailed(cause, exit_code):
                self._end(EngineGone(exit_code=exit_code, cause=cause))
            case Finish():
                self.stop()
            case _:
                assert_never(msg)

    def _on_said(self, engine: EngineHandle, msg: ForFleet) -> None:
        match msg:
            case StepOutput():
                self.traffic.note(engine, msg)
                self._emit(labelled(msg, engine.rank))
            case Refused():
                self._on_refused(engine, msg)
            case Traced():
                self._emit(labelled(msg, engine.rank))
            case ExpertLoad() if self.experts is None:
                self._emit(msg)  # nothing to place: the front end only adds it up
            case Stopped():
                if self.single:
                    self._emit(msg)
            case _:
                self._on_news(engine, msg)

    def _on_news(
        self, engine: EngineHandle, msg: Phase | AdminResult | Ready | Joined | Parted | ExpertLoad | Placed
    ) -> None:
        match msg:
            case Phase():
                self._on_phase()
            case AdminResult():
                self._polls.answered(engine, msg)
            case Ready() | Joined() | Parted():
                self._on_standing(engine)
            case ExpertLoad():
                if self.experts is not None:
                    self.experts.note(msg)
            case Placed():
                if self.experts is not None:
                    self.experts.placed(msg)
            case _:
                assert_never(msg)

    def _on_refused(self, engine: EngineHandle, msg: Refused) -> None:
        self.traffic.end(msg.rid)
        if msg.code == "server_draining" and not self._late and not self.single:  # somebody sent it a SIGTERM
            engine.draining = True
            self._emit(RequestsLost(rids=(msg.rid,), engine=engine.rank, died=False, cause=msg.message))
        else:
            self._emit(msg)

    def _on_phase(self) -> None:
        phase = min((engine.phase for engine in self.engines), key=lambda phase: phase.percent)
        if phase != self.phase and (self.ready is None or not self._serving()):
            self.phase = phase
            self._emit(phase)

    def _on_standing(self, engine: EngineHandle) -> None:
        if self._apart_s is None and not self._serving():
            self._apart_s = time.monotonic()
        for group in self.groups:
            group.poke()

    def _on_lost(self, engine: EngineHandle) -> None:
        if not engine.retired:
            self.hand_back(engine, died=not engine.obeyed, cause="it ended")
        self._on_standing(engine)

    def _on_ended(self, engine: EngineHandle, end: EngineGone) -> None:
        self._polls.lost(engine)
        self._on_standing(engine)
        if end.restarting and self.single:
            self.ready = None
            self.traffic.forget_waiting()
            self._emit(end)
        if end.restarting or engine.retired or engine not in self.engines:
            return
        name = engine.name
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
        """Ends the group of an engine that ended as it was told: the others would wait for it in vain."""
        for other in next((group.engines for group in self.groups if engine in group.engines), []):
            if not other.up and other.end is None:
                self._spawn(None, other.close(0.0), f"end of {other.name}")

    def _emit(self, msg: FromEngine) -> None:
        if not self.outbox.closed:
            self.outbox.put(msg, force=True)

    def _end(self, gone: EngineGone) -> None:
        if self._over:
            return
        self._over, self.ready = True, None
        self._failure = gone.cause if gone.exit_code else ""
        self._emit(gone)

    def _spawn(self, owner: EngineGroup | None, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = owner
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:  # a fault of ours
            log.error("%s failed", task.get_name(), exc_info=error)
            self._end(EngineGone(exit_code=1, cause=f"{task.get_name()} failed: {error!r}"))
