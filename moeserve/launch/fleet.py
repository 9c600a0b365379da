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
from moeserve.config import Config
from moeserve.errors import ConfigError
from moeserve.launch.check_parallel import check_parallel
from moeserve.launch.facts import combined, labelled, slowest
from moeserve.launch.heartbeat import UNHEALTHY_S
from moeserve.launch.interface import EngineGone, FromEngine, RequestsLost, Resized
from moeserve.launch.member import Member
from moeserve.launch.muster import Muster, Venue
from moeserve.launch.order import Role
from moeserve.launch.rendezvous import Rendezvous
from moeserve.launch.rundir import RunDir
from moeserve.launch.scaling import Scaling
from moeserve.launch.seat import INBOX_LIMIT
from moeserve.launch.traffic import Polls, Traffic
from moeserve.launch.view import EngineView, FleetView
from moeserve.loader.hf_config import read_model_spec
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.loader.spec import ModelSpec
from moeserve.messages import (
    Abort,
    Answer,
    Call,
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
from moeserve.parallel.world import World

if TYPE_CHECKING:
    from moeserve.launch.rebalancing import Rebalancing

log = logging.getLogger(__name__)

POLICY = RestartPolicy(first_pause_s=0.05, proven_s=10.0)


class Fleet:
    """`EngineLink` to dp engines of tp processes each; see interface.py. options: those of `Seat`.

    It is ready once all engines serve, and stays so while some of them are replaced. It ends when the group cannot be
    brought together again: an engine cannot be restarted, or the engines keep failing to meet.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        self.inbox: Inbox[FromEngine] = Inbox("front end", INBOX_LIMIT)
        self.phase = Phase("starting", 0, 0.0)
        self.ready: Ready | None = None
        self.members: list[Member] = []
        self.musters: list[Muster] = []
        self.experts: Rebalancing | None = None  # None: no experts, or each engine has all
        self.config = config
        self.traffic = Traffic(self._serving)
        self.scaling = Scaling(self)
        self._options = {"policy": POLICY} | options
        self._polls = Polls(self._tell)
        self._first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._run_dir: RunDir | None = None
        self._machines: Rendezvous | None = None
        self._venue: Venue | None = None
        self._tasks: dict[asyncio.Task[None], Muster | None] = {}
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
        self._venue = Venue(self._run_dir.path, count(1), parallel.tp, machines.address)
        self.members = self.new_members(range(parallel.dp), parallel.dp, self._table)
        self.add_musters([self.members] if self.together else [[member] for member in self.members])
        if self.experts is not None and parallel.rebalance == "auto":
            self._spawn(None, self.scaling.watch(), "rebalancing")

    def _deal_out(self, spec: ModelSpec) -> Rebalancing:
        from moeserve.launch.rebalancing import Rebalancing  # here, because it needs numpy

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
        return len(self.members)

    @property
    def stalled_s(self) -> float:
        return max((member.seat.stalled_s for member in self._serving()), default=0.0)

    @property
    def healthy(self) -> bool:
        """Some engines serve, and all that do make progress; a group that comes together again may take a moment."""
        if self.ready is None or self._over:
            return False
        serving = self._serving()
        if not serving:
            return self._apart_s is None or time.monotonic() - self._apart_s <= UNHEALTHY_S
        return all(member.seat.healthy for member in serving)

    @property
    def view(self) -> FleetView:
        loads = self.traffic.balancer.loads
        engines = [
            EngineView(
                rank=member.rank,
                host=member.host,
                pid=member.seat.pid,
                state=member.state,
                epoch=member.epoch,
                restarts=member.restarts,
                num_requests=len(member.rids),
                predicted_work=loads[member.rank].work if member.rank in loads else 0.0,
                last=member.last,
            )
            for member in self.members
        ]
        return FleetView(
            dp=self.dp,
            tp=self.config.parallel.tp,
            together=self.together,
            epoch=max((muster.epoch for muster in self.musters), default=0),
            complete=all(muster.complete for muster in self.musters),
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

    def _serving(self) -> list[Member]:
        """Those that may get requests."""
        known = self.traffic.balancer.loads  # an engine that has joined is opened there a moment later
        together = [member for muster in self.musters if muster.complete for member in muster.members]
        return [member for member in together if member.up and not member.draining and member.rank in known]

    # ---- from the front end ---------------------------------------------------------------------------------

    def send(self, msg: EngineIn) -> None:
        match msg:
            case Submit():
                self.traffic.submit(msg)
            case Abort(rids=rids):
                self.traffic.abort(rids)
            case Call():
                self._polls.ask(msg, [member for member in self.members if member.up])
            case Drain(deadline_s=deadline_s):
                # The engines learn of it at the deadline: one that dies before needs the others, also the idle ones.
                self._draining = asyncio.get_running_loop().call_later(deadline_s, self._drain)
            case TraceNext():
                for muster in self.musters:
                    if muster.complete:
                        muster.members[0].seat.send(msg)  # one vote is enough for all
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
        await asyncio.gather(*(member.stop(deadline_s) for member in self.members))
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
        for member in self._serving():
            member.drain(0.0)

    # ---- engines come and go --------------------------------------------------------------------------------

    def new_members(self, ranks: Iterable[int], dp: int, table: PlacementTable | None) -> list[Member]:
        """Starts engines that belong to no group yet."""
        assert self._machines is not None
        hosts = self._machines.hosts
        members = [Member(self, rank, self._role(rank, dp, table), self.config, self._options) for rank in ranks]
        for member in members:
            member.start(hosts[member.rank * len(hosts) // dp])
        return members

    def add_musters(self, groups: Iterable[list[Member]]) -> None:
        assert self._venue is not None
        alone = not self.together and self.config.parallel.tp == 1
        for members in groups:
            muster = Muster(
                members, self._venue, placement=self._table, alone=alone, met=self._on_met, hopeless=self._on_hopeless
            )
            self.musters.append(muster)
            self._spawn(muster, muster.run(), f"muster of {members[0].seat.name}")

    def drop_muster(self, muster: Muster) -> None:
        self.musters.remove(muster)
        muster.close()
        for task, owner in self._tasks.items():
            if owner is muster:
                task.cancel()

    def settle(self, placement: PlacementTable | None) -> None:
        """Engines that are started from now on are told of this membership and placement."""
        for member in self.members:
            member.role = self._role(member.rank, self.dp, placement)
        for muster in self.musters:
            muster.placement = placement

    def hand_back(self, member: Member, *, died: bool, cause: str) -> None:
        """Its requests are the front end's again."""
        rids = self.traffic.lost(member)
        if rids or died:
            self._tell(RequestsLost(rids=rids, engine=member.rank, died=died, cause=cause))

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
        present = [member.seat.ready for member in self.members if member.seat.ready is not None]
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

    def _on_met(self, muster: Muster) -> None:
        if not muster.complete:
            return  # lost again, or regrouped
        self._apart_s = None
        if self.experts is not None:
            facts = muster.members[0].seat.ready
            self.experts.joined(muster.placement, facts.expert_bytes if facts is not None else 0)
        for member in muster.members:
            assert member.seat.ready is not None
            self.traffic.balancer.open(member.rank, member.seat.ready)
        complete = all(other.complete for other in self.musters)
        if self.ready is not None or complete:
            self.announce()
        self.traffic.flush()
        if self._late:
            self._drain()

    def _on_hopeless(self, cause: str, exit_code: int) -> None:
        self._end(EngineGone(exit_code=exit_code, cause=cause))

    # ---- from the engines -----------------------------------------------------------------------------------

    async def hear(self, member: Member, msg: EngineOut) -> None:
        await self.inbox.room()
        if member.retired:
            return  # its requests have gone elsewhere, maybe while this one waited for room
        match msg:
            case StepOutput():
                self.traffic.note(member, msg)
                msg = labelled(msg, member.rank)
            case Refused():
                self.traffic.end(msg.rid)
                if msg.code == "server_draining" and not self._late:  # somebody sent it a SIGTERM
                    member.draining = True
                    self._tell(RequestsLost(rids=(msg.rid,), engine=member.rank, died=False, cause=msg.message))
                    return
            case Traced():
                msg = labelled(msg, member.rank)
            case ExpertLoad() if self.experts is None:
                pass  # nothing to place: the front end only adds it up
            case _:
                self._on_news(member, msg)
                return
        self.inbox.put(msg)

    def _on_news(self, member: Member, msg: EngineOut) -> None:
        """What the front end need not know."""
        match msg:
            case Phase():
                self._on_phase()
            case Answer():
                self._polls.answered(member, msg)
            case Ready() | Joined() | Parted():
                self._on_standing(member)
            case ExpertLoad() if self.experts is not None:
                self.experts.note(msg)
            case Placed() if self.experts is not None:
                self.experts.placed(msg)

    def _on_phase(self) -> None:
        phase = slowest([member.seat.phase for member in self.members])
        if phase != self.phase and (self.ready is None or not self._serving()):
            self.phase = phase
            self._tell(phase)

    def _on_standing(self, member: Member) -> None:
        if self._apart_s is None and not self._serving():
            self._apart_s = time.monotonic()
        for muster in self.musters:
            muster.poke()

    def lost(self, member: Member) -> None:
        if not member.retired:
            self.hand_back(member, died=not member.obeyed, cause="it ended")
        self._on_standing(member)

    def gone(self, member: Member, end: EngineGone) -> None:
        self._polls.lost(member)
        self._on_standing(member)
        if end.restarting or member.retired or member not in self.members:
            return
        name = member.seat.name
        if all(other.end is not None for other in self.members):
            self._end(end)
        elif end.exit_code == 0 and member.obeyed:
            self._dissolve(member)
        elif self.together or not self.ready:
            cause = end.cause if end.cause.startswith(name) else f"{name}: {end.cause}"
            self._end(msgspec.structs.replace(end, cause=cause))
        else:
            log.error("%s is not started again; %d engines go on", name, len(self._serving()))

    def _dissolve(self, member: Member) -> None:
        """It ended as told, so its group has nothing left to do: nobody waits for it to meet again."""
        for muster in self.musters:
            if member in muster.members:
                for other in muster.members:
                    if not other.up and other.end is None:
                        self._spawn(None, other.stop(0.0), f"end of {other.seat.name}")

    # ---- endings --------------------------------------------------------------------------------------------

    def _tell(self, msg: FromEngine) -> None:
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

    def _spawn(self, owner: Muster | None, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = owner
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:  # a fault of ours
            log.error("%s failed", task.get_name(), exc_info=error)
            self._end(EngineGone(exit_code=1, cause=f"{task.get_name()} failed: {error!r}"))
