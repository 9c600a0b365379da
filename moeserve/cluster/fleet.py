"""The engine processes behind one link: balances requests over them and keeps their group together
over deaths.

The requests of an engine that dies are handed back (RequestsLost; with a single engine EngineGone
says so), the other engines keep theirs, and a new process joins them in the next epoch. With ep on
all engines form one group and compute in lockstep; with ep off, or for a model without experts,
each is on its own.
"""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from moeserve import messages as m
from moeserve.actor.actor import Actor, Inbox
from moeserve.actor.supervisor import RestartPolicy
from moeserve.cluster.assignment import equal_shares
from moeserve.cluster.balance import Traffic
from moeserve.cluster.engine_group import EngineGroup, GroupFailed, GroupMet, combined
from moeserve.cluster.engine_handle import (
    EngineEnded,
    EngineHandle,
    EngineSaid,
    ForFleet,
    ProcessLost,
)
from moeserve.cluster.heartbeat import UNHEALTHY_S
from moeserve.cluster.host import Root
from moeserve.cluster.link import INBOX_LIMIT, EngineGone, FromEngine, RequestsLost, Resized
from moeserve.cluster.scaling import Scaling
from moeserve.cluster.view import FleetView, fleet_view
from moeserve.config import Config
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from moeserve.cluster.rebalancing import Rebalancing

log = logging.getLogger(__name__)

POLICY = RestartPolicy(first_pause_s=0.05, proven_s=10.0)


class Fleet(Actor[EngineSaid | ProcessLost | EngineEnded | GroupMet | GroupFailed]):
    """`EngineLink` to dp engines of tp processes each; see link.py. root: the process that keeps
    the engines here, if that is another one. options: those of `EngineProcess`.

    A fleet is ready once all engines serve, and stays so while some of them are replaced. It ends
    when the group cannot be brought together again: an engine cannot be restarted, or the engines
    keep failing to meet. A single engine of one process has no others that could take over: the
    front end is told of its end instead.
    """

    def __init__(self, config: Config, root: Root | None = None, **options: Any) -> None:
        super().__init__("fleet")
        self.config = config
        self.root = root
        self.single = config.parallel.num_ranks == 1
        self.outbox: Inbox[FromEngine] = Inbox("front end", INBOX_LIMIT)
        self.phase = m.Phase("starting", 0, 0.0)
        self.ready: m.Ready | None = None
        self.engines: list[EngineHandle] = []
        self.groups: list[EngineGroup] = []
        self.experts: Rebalancing | None = None  # None: no experts, or each engine has all
        self.traffic = Traffic(self._serving)
        self.scaling = Scaling(self, **({} if self.single else {"policy": POLICY}) | options)
        self._life: asyncio.Task[None] | None = None
        self._closing: list[asyncio.Future[None]] = []  # engines that would wait for others in vain
        self._draining: asyncio.TimerHandle | None = None  # goes off when no time is left
        self._late = False  # it did
        self._apart_s: float | None = None  # since when no engine serves
        self._over = False  # the final EngineGone was sent
        self._failure = ""  # its cause, if that was not an ordered stop

    # ---- requests, and what comes back
    # ----------------------------------------------------------------------

    def send(self, msg: m.EngineIn) -> None:
        """Sends a message to the engine or the engines that it concerns. Raises Overloaded if one
        does not keep up.
        """
        match msg:
            case m.Submit():
                self.traffic.submit(msg)
            case m.Abort(rids=rids):
                self.traffic.abort(rids)
            case m.Drain(deadline_s=deadline_s) if self.single:
                self.engines[0].drain(deadline_s)
            case m.Drain(deadline_s=deadline_s):
                # The engines learn of it at the deadline: one that dies before needs the others,
                # also the idle ones.
                self._draining = asyncio.get_running_loop().call_later(deadline_s, self._drain)
            case m.TraceNext():
                for group in self.groups:
                    if group.complete:
                        group.engines[0].send(msg)  # one vote is enough for all
            case m.Ping() | m.Join() | m.Place() | m.AbortAll():
                raise ValueError(f"a fleet sends {type(msg).__name__} itself")
            case _:
                assert_never(msg)

    def _serving(self) -> list[EngineHandle]:
        """Returns the engines that may get requests."""
        known = (
            self.traffic.balancer.loads
        )  # an engine that has joined is opened there a moment later
        return [engine for engine in self.engines if engine.serving and engine.rank in known]

    def handle(self, msg: EngineSaid | ProcessLost | EngineEnded | GroupMet | GroupFailed) -> None:
        """Acts on news of an engine or a group."""
        match msg:
            case EngineSaid(engine, said):
                if not engine.retired:  # its requests have gone elsewhere
                    self._on_said(engine, said)
            case ProcessLost(engine):
                self._on_standing()
                if not engine.retired:
                    self.hand_back(engine, died=not engine.obeyed, cause="it ended")
            case EngineEnded(engine, end):
                self._on_ended(engine, end)
            case GroupMet(group):
                self._on_met(group)
            case GroupFailed(cause, exit_code):
                self._end(EngineGone(exit_code=exit_code, cause=cause))
            case _:
                assert_never(msg)

    def _on_said(self, engine: EngineHandle, msg: ForFleet) -> None:
        match msg:
            case m.StepOutput():
                self.traffic.note(engine.rank, msg)
                if (
                    msg.record is not None
                ):  # with ep off, each engine is rank 0 of a group of its own
                    msg.record.dp_rank = engine.rank
                self._emit(msg)
            case m.Refused():
                self._on_refused(engine, msg)
            case m.Traced():
                self._emit(msgspec.structs.replace(msg, dp_rank=engine.rank))
            case m.ExpertLoad() | m.Placed():
                self._on_experts(msg)
            case m.Stopped():
                if self.single:
                    self._emit(msg)
            case m.Phase():
                self._on_phase()
            case m.Ready() | m.Joined() | m.Parted():
                self._on_standing()
            case _:
                assert_never(msg)

    def _emit(self, msg: FromEngine) -> None:
        if not self.outbox.closed:
            self.outbox.put(msg, force=True)

    # ---- start and end
    # --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all engines and returns before they are ready. Raises ConfigError for settings
        that cannot work.
        """
        assert self._life is None, "a link is started once"
        await self.scaling.start()
        self._life = asyncio.get_running_loop().create_task(self.run(), name="fleet")

    async def run(self) -> None:
        """Acts on news until it is stopped. A fault of ours is the end of the link."""
        try:
            await super().run()
        except Exception as error:
            log.exception("the fleet failed")
            self._end(EngineGone(exit_code=1, cause=f"the fleet failed: {error!r}"))

    async def close(self, deadline_s: float) -> None:
        """Lets running requests finish for up to `deadline_s`, then ends all engines. May be called
        again.
        """
        failure = self._failure
        if self._life is None:
            return
        if self._draining is not None:
            self._draining.cancel()
        await self.scaling.stop()
        await asyncio.gather(*(engine.close(deadline_s) for engine in self.engines))
        self.stop()  # with the engines' last words
        await asyncio.wait([self._life])
        self._end(EngineGone(exit_code=0, cause="stopped"))
        await self.scaling.close(failure)

    def _drain(self) -> None:
        """Ends the running requests. Engines that do not serve yet are told later: requests may
        wait for them.
        """
        self._late = True
        for engine in self._serving():
            engine.drain(0.0)

    def _end(self, gone: EngineGone) -> None:
        if self._over:
            return
        self._over = True
        self.ready = None
        self._failure = gone.cause if gone.exit_code else ""
        self._emit(gone)

    # ---- what a probe or a person asks
    # ----------------------------------------------------------------------

    @property
    def together(self) -> bool:
        """Whether the engines form one group."""
        return self.experts is not None

    @property
    def dp(self) -> int:
        """Number of engines."""
        return len(self.engines)

    @property
    def healthy(self) -> bool:
        """Whether some engines serve, and all that do make progress; a group may take a moment to
        meet again.
        """
        if self.ready is None or self._over:
            return False
        serving = self._serving()
        now_s = time.monotonic()
        if not serving:
            return self._apart_s is None or now_s - self._apart_s <= UNHEALTHY_S
        return all(engine.process.heart.healthy(now_s) for engine in serving)

    @property
    def view(self) -> FleetView:
        """A snapshot of the fleet."""
        return fleet_view(self)

    # ---- engines that come, go and meet
    # ---------------------------------------------------------------------

    def _on_standing(self) -> None:
        """Takes note that an engine is up, lost, in a group, or out of it."""
        for group in self.groups:
            group.poke()
        if self._apart_s is None and not self._serving():
            self._apart_s = time.monotonic()

    def _on_met(self, group: EngineGroup) -> None:
        if not group.complete:
            return  # lost again, or regrouped
        self._apart_s = None
        if self.experts is not None:
            facts = group.engines[0].ready
            nodes = equal_shares([engine.host.number for engine in group.engines])
            self.experts.joined(
                group.placement, facts.expert_bytes if facts is not None else 0, nodes
            )
        for engine in group.engines:
            assert engine.ready is not None
            self.traffic.balancer.open(
                engine.rank, engine.ready.block_size, engine.ready.num_blocks
            )
        if self.ready is not None or all(other.complete for other in self.groups):
            self.announce()
        self.traffic.flush()
        if self._late:
            self._drain()

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
        known = self.ready
        self.ready = facts
        if known is None:
            self._emit(facts)
        elif known != facts:
            self._emit(Resized(facts))

    def hand_back(self, engine: EngineHandle, *, died: bool, cause: str) -> None:
        """Returns an engine's requests to the front end."""
        rids = self.traffic.balancer.close(engine.rank)
        if (rids or died) and not self.single:
            self._emit(RequestsLost(rids=rids, engine=engine.rank, died=died, cause=cause))

    def _on_refused(self, engine: EngineHandle, msg: m.Refused) -> None:
        self.traffic.balancer.end(msg.rid)
        if (
            msg.code == "server_draining" and not self._late and not self.single
        ):  # somebody sent it a SIGTERM
            engine.draining = True
            self._emit(
                RequestsLost(rids=(msg.rid,), engine=engine.rank, died=False, cause=msg.message)
            )
        else:
            self._emit(msg)

    def _on_experts(self, msg: m.ExpertLoad | m.Placed) -> None:
        if self.experts is None:
            self._emit(msg)  # nothing to place: the front end only adds the load up
        elif isinstance(msg, m.Placed):
            self.experts.placed(msg)
        else:
            self.experts.note(msg)

    def _on_phase(self) -> None:
        phase = min((engine.phase for engine in self.engines), key=lambda phase: phase.percent)
        if phase != self.phase and (self.ready is None or not self._serving()):
            self.phase = phase
            self._emit(phase)

    def _on_ended(self, engine: EngineHandle, end: EngineGone) -> None:
        self._on_standing()
        if end.restarting and self.single:
            self.ready = None
            self.traffic.waiting.clear()  # the front end submits all requests again
            self._emit(end)
        if end.restarting or engine.retired or engine not in self.engines:
            return
        name = engine.name
        if not (self.single or end.exit_code == 0 or end.cause.startswith(name)):
            end = msgspec.structs.replace(end, cause=f"{name}: {end.cause}")
        if all(other.end is not None for other in self.engines):
            self._end(end)
        elif end.exit_code == 0 and engine.obeyed:
            # Its group ends: the others would wait for it in vain.
            others = (
                other for group in self.groups if engine in group.engines for other in group.engines
            )
            ends = (other.close(0.0) for other in others if not other.up and other.end is None)
            self._closing += map(asyncio.ensure_future, ends)
        elif self.together or not self.ready:
            self._end(end)
        else:
            log.error("%s is not started again; %d engines go on", name, len(self._serving()))
