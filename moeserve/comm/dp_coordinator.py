"""The step vote between engines: rows go to the centre, the matrix comes back, and each engine decides from it."""

from __future__ import annotations

import asyncio

from moeserve.comm.frames import VOTE_BYTES, Frame, Kind, frame, pack_gone, pack_vote, unpack_gone, unpack_votes
from moeserve.comm.members import Members
from moeserve.comm.star import Link, engines, gather, ranks_of, reach
from moeserve.engine.vote import Action, Decision, DPCoordinator, Vote, decide
from moeserve.errors import PeerLost, StepSkew

LEAF_WAITS = 1.25  # times the deadline: the centre knows better who is silent, and should say so first
FIRST_VOTE = 10  # times the deadline: others may still read experts from disk before their first step


async def open_coordinator(members: Members) -> DPCoordinator:
    """Meets the other engines. To be called by each engine's tp_rank 0, on the loop that will vote.

    Raises PeerLost naming who did not come, ConfigError when this machine does not let us listen.
    """
    if members.size == members.tp_size:
        return _Alone(members)
    if members.dp_rank == 0:
        return _Centre(members, await gather(members))
    return _Leaf(members, await reach(members))


class _Alone:
    """The DP coordinator of one engine."""

    called = False
    lost = None

    def __init__(self, members: Members) -> None:
        self.epoch = members.epoch
        self._never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def decide(self, vote: Vote) -> Decision:
        return decide((vote,))

    async def rung(self) -> None:
        await asyncio.shield(self._never)

    async def broken(self) -> None:
        await asyncio.shield(self._never)

    def close(self, cause: str = "", missing: tuple[int, ...] = ()) -> None:
        """Nobody to tell."""


class _Star:
    """What centre and leaf share: one open vote, the bell, the deadline, and how it ends."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.epoch = members.epoch
        self._loop = asyncio.get_running_loop()
        self._step = 0  # of the next vote, or of the one that is open
        self._open: asyncio.Future[Decision] | None = None
        self._called = False
        self._bell: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lost: asyncio.Future[PeerLost] = self._loop.create_future()

    @property
    def called(self) -> bool:
        return self._called

    @property
    def lost(self) -> PeerLost | None:
        return self._lost.result() if self._lost.done() else None

    async def broken(self) -> None:
        await asyncio.shield(self._lost)

    async def decide(self, vote: Vote) -> Decision:
        assert self._open is None, "one vote at a time"
        assert vote.epoch == self.epoch, (vote.epoch, self.epoch)
        self._raise_if_lost()
        self._called = False
        self._open = self._loop.create_future()
        self._cast(vote)
        try:
            return await self._open
        except asyncio.CancelledError:  # nobody will hear the answer, and no later vote could match it
            self.close()
            raise
        finally:
            self._open = None

    async def rung(self) -> None:
        while not self._called:
            self._raise_if_lost()
            self._bell = self._loop.create_future()
            try:
                await self._bell
            finally:
                self._bell = None

    def close(self, cause: str = "", missing: tuple[int, ...] = ()) -> None:
        self._part(PeerLost(cause or "this engine left the vote", missing))

    def _cast(self, vote: Vote) -> None:
        raise NotImplementedError

    def _hang_up(self, farewell: bytes) -> None:
        raise NotImplementedError

    def _overdue(self) -> None:
        raise NotImplementedError

    def _raise_if_lost(self) -> None:
        if (lost := self.lost) is not None:
            raise PeerLost(str(lost), lost.missing)

    @property
    def _voting(self) -> bool:
        return self._open is not None and not self._open.done()

    def _ring(self) -> None:
        if not self._voting:
            self._called = True
            if self._bell is not None and not self._bell.done():
                self._bell.set_result(None)

    def _set_deadline(self, times: float = 1.0) -> None:
        if self._timer is None:
            deadline_s = times * self.members.deadline_s * (1 if self._step else FIRST_VOTE)
            self._timer = self._loop.call_later(deadline_s, self._overdue)

    def _settle(self, matrix: bytes) -> Decision | None:
        """Gives the open vote its decision."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert self._open is not None
        if self._open.done():  # cancelled just now: `decide` is about to close
            return None
        self._step += 1
        try:
            decision = decide(unpack_votes(matrix))
        except StepSkew as error:
            self._open.set_exception(error)
            return None
        self._open.set_result(decision)
        return decision

    def _part(self, lost: PeerLost) -> None:
        """Ends everything; the first cause counts."""
        if self._lost.done():
            return
        self._lost.set_result(lost)
        if self._timer is not None:
            self._timer.cancel()
        self._hang_up(frame(Kind.GONE, body=pack_gone(str(lost), lost.missing)))
        for waiting in (self._open, self._bell):
            if waiting is not None and not waiting.done():
                waiting.set_exception(PeerLost(str(lost), lost.missing))

    def _left(self, engine: int, farewell: Frame) -> None:
        cause, missing = unpack_gone(farewell.body)
        self._part(PeerLost(f"{engines([engine])} left: {cause}", missing))

    def _died(self, engine: int, cause: str) -> None:
        self._part(PeerLost(f"{engines([engine])} {cause}", ranks_of(self.members, [engine])))


class _Centre(_Star):
    def __init__(self, members: Members, links: dict[int, Link]) -> None:
        super().__init__(members)
        self._links = links
        self._num_engines = len(links) + 1
        self._rows: dict[int, bytes] = {}  # of the open step
        self._parked = False
        for engine, link in links.items():
            link.open(
                lambda got, engine=engine: self._heard(engine, got),  # type: ignore[misc]
                lambda cause, engine=engine: self._died(engine, cause),  # type: ignore[misc]
            )

    def _cast(self, vote: Vote) -> None:
        self._take(0, pack_vote(vote))

    def _heard(self, engine: int, got: Frame) -> None:
        if got.kind is Kind.GONE:
            self._left(engine, got)
        elif got.kind is Kind.ROW and engine not in self._rows and len(got.body) == VOTE_BYTES:
            self._take(engine, got.body)
        else:
            raise ValueError(f"{got.kind.name} in step {self._step}")

    def _take(self, engine: int, row: bytes) -> None:
        if not self._rows:
            self._set_deadline()
        self._rows[engine] = row
        if len(self._rows) == self._num_engines:
            self._distribute()
        elif self._parked:  # all sleep but this one: nobody may be rung twice, or miss it
            self._parked = False
            bell = frame(Kind.RING, self._step)
            for other, link in list(self._links.items()):
                if other != engine:
                    link.send(bell)
            self._ring()

    def _distribute(self) -> None:
        matrix = b"".join(self._rows[engine] for engine in range(self._num_engines))
        self._rows.clear()
        answer = frame(Kind.MATRIX, self._step, matrix)
        for link in list(self._links.values()):
            link.send(answer)
        if not self._lost.done():
            decision = self._settle(matrix)
            self._parked = decision is not None and decision.action is Action.PARK

    def _overdue(self) -> None:
        silent = [engine for engine in range(self._num_engines) if engine not in self._rows]
        cause = f"{engines(silent)} did not vote in step {self._step} of epoch {self.epoch}"
        self._part(PeerLost(cause, ranks_of(self.members, silent)))

    def _hang_up(self, farewell: bytes) -> None:
        for link in self._links.values():
            link.send(farewell)
            link.close()


class _Leaf(_Star):
    def __init__(self, members: Members, link: Link) -> None:
        super().__init__(members)
        self._link = link
        link.open(self._heard, lambda cause: self._died(0, cause))

    def _cast(self, vote: Vote) -> None:
        self._set_deadline(LEAF_WAITS)
        self._link.send(frame(Kind.ROW, vote.step, pack_vote(vote)))

    def _heard(self, got: Frame) -> None:
        if got.kind is Kind.GONE:
            self._left(0, got)
        elif got.kind is Kind.RING:
            if got.step >= self._step:  # an older one is stale
                self._ring()
        elif got.kind is Kind.MATRIX and self._voting:
            self._settle(got.body)
        else:
            raise ValueError(f"{got.kind.name} for step {got.step} in step {self._step}")

    def _overdue(self) -> None:
        cause = f"{engines([0])} did not answer in step {self._step} of epoch {self.epoch}"
        self._part(PeerLost(cause, ranks_of(self.members, [0])))

    def _hang_up(self, farewell: bytes) -> None:
        self._link.send(farewell)
        self._link.close()
