"""The step vote between the engines of a group, over one stream from each follower to the leader,
engine 0.

Followers send their votes to the leader, which sends all of them back; each engine decides from
them by itself. On one host the streams are Unix sockets in the members' directory, between hosts
TCP, encrypted. All of it runs on the caller's event loop: a vote is one message and one wake-up,
without a thread in between.
"""

import asyncio
import os
from contextlib import closing
from functools import partial
from typing import Any

import msgspec

from moeserve.comm.members import Members
from moeserve.comm.stream import (
    Address,
    AsyncStream,
    KeyedSocket,
    Peer,
    StreamListener,
    connect,
    frame,
    to_address,
)
from moeserve.engine.vote import Action, Decision, DPCoordinator, Vote, decide
from moeserve.errors import ConfigError, PeerLost, StepSkew

MAX_FRAME_BYTES = 1 << 20
FOLLOWER_WAITS = (
    1.25  # times the deadline: the leader knows better who is silent, and should report it first
)
FIRST_VOTE = (
    10  # times the deadline: others may still read experts from disk before their first step
)


class Votes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Leader to followers: the votes of all engines, in rank order."""

    votes: list[Vote]


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Leader to followers: an engine has voted in this step, which all the others have slept
    through so far.
    """

    step: int


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Either way, as the last message: the sender leaves. missing: ranks that are lost, as far as
    it knows.
    """

    cause: str
    missing: tuple[int, ...]


async def open_coordinator(members: Members) -> DPCoordinator:
    """Connect to the other engines. To be called by each engine's tp_rank 0, on the loop that will
    vote.

    Raises PeerLost naming the engines that did not come, ConfigError when this machine does not let
    us listen.
    """
    if members.size == members.tp_size:
        return _Leader(members, {})
    if members.dp_rank == 0:
        return await _Leader.open(members)
    return await _Follower.open(members)


class _Coordinator:
    """The shared part of leader and follower: one open vote, its deadline, the wake-up, and how the
    group ends.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self.epoch = members.epoch
        self._loop = asyncio.get_running_loop()
        self._step = 0  # of the next vote, or of the one that is open
        self._open: asyncio.Future[Decision] | None = None
        self._woken = asyncio.Event()  # also when the group is lost
        self._timer: asyncio.TimerHandle | None = None
        self._lost: asyncio.Future[PeerLost] = self._loop.create_future()
        self._streams: dict[int, AsyncStream[Any]] = {}  # to other engines

    @property
    def woken(self) -> bool:
        """Whether, after a PARK, another engine has voted in the next step and waits."""
        return self._woken.is_set() and not self._lost.done()

    @property
    def lost(self) -> PeerLost | None:
        """The error that broke the group; None while it works."""
        return self._lost.result() if self._lost.done() else None

    async def broken(self) -> None:
        """Return once the group is broken."""
        await asyncio.shield(self._lost)

    async def decide(self, vote: Vote) -> Decision:
        """Vote, and return the common decision of all. Raises PeerLost or StepSkew."""
        assert self._open is None, "one vote at a time"
        assert vote.epoch == self.epoch, (vote.epoch, self.epoch)
        self._raise_if_lost()
        self._woken.clear()
        self._open = self._loop.create_future()
        self._cast(vote)
        try:
            return await self._open
        except (
            asyncio.CancelledError
        ):  # nobody will read the answer, and no later vote could match it
            self.close()
            raise
        finally:
            self._open = None

    async def wait_woken(self) -> None:
        """Return once `woken` is true. Raises PeerLost."""
        await self._woken.wait()
        self._raise_if_lost()

    def close(self, cause: str = "", missing: tuple[int, ...] = ()) -> None:
        """Drop the connections; the other engines learn the cause and the ranks known to be
        missing.
        """
        self._end(PeerLost(cause or "this engine left the vote", missing))

    def _cast(self, vote: Vote) -> None:
        raise NotImplementedError

    def _overdue(self) -> None:
        raise NotImplementedError

    def _raise_if_lost(self) -> None:
        if (lost := self.lost) is not None:
            raise PeerLost(str(lost), lost.missing)

    @property
    def _voting(self) -> bool:
        return self._open is not None and not self._open.done()

    def _wake(self) -> None:
        if not self._voting:
            self._woken.set()

    def _set_deadline(self, times: float = 1.0) -> None:
        if self._timer is None:
            deadline_s = times * self.members.deadline_s * (1 if self._step else FIRST_VOTE)
            self._timer = self._loop.call_later(deadline_s, self._overdue)

    def _finish(self, votes: list[Vote]) -> Decision | None:
        """Give the open vote its decision; None when there is none, or nobody waits for it any
        more.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert self._open is not None
        if self._open.done():  # cancelled just now: `decide` is about to close
            return None
        self._step += 1
        try:
            decision = decide(votes)
        except StepSkew as error:
            self._open.set_exception(error)
            return None
        self._open.set_result(decision)
        return decision

    def _end(self, lost: PeerLost) -> None:
        """End everything; the first cause counts."""
        if self._lost.done():
            return
        self._lost.set_result(lost)
        if self._timer is not None:
            self._timer.cancel()
        leaving = frame(Leaving(str(lost)[:2000], lost.missing[:1000]))
        for stream in self._streams.values():
            stream.send(leaving)
            stream.close()
        self._woken.set()
        if self._open is not None and not self._open.done():
            self._open.set_exception(PeerLost(str(lost), lost.missing))

    def _left(self, engine: int, leaving: Leaving) -> None:
        self._end(PeerLost(f"engine {engine} left: {leaving.cause}", leaving.missing))

    def _died(self, engine: int, cause: str) -> None:
        self._end(_engines_lost(self.members, [engine], cause))


class _Leader(_Coordinator):
    """Engine 0: collects the votes and sends all of them to its followers, if it has any."""

    @classmethod
    async def open(cls, members: Members) -> "_Leader":
        """Accept a stream from each follower."""
        with closing(_listen(members)) as listener:
            try:
                async with asyncio.timeout(members.deadline_s):
                    await listener.complete.wait()
                return cls(members, listener.accepted)
            except BaseException as error:
                for link in listener.accepted.values():
                    link.sock.close()
                if not isinstance(error, TimeoutError):
                    raise
        missing = sorted(peer.rank for peer in listener.missing)
        cause = f"did not come to the vote of epoch {members.epoch} within {members.deadline_s:g} s"
        raise _engines_lost(members, missing, cause)

    def __init__(self, members: Members, followers: dict[Peer, KeyedSocket]) -> None:
        super().__init__(members)
        self._num_engines = len(followers) + 1
        self._votes: dict[int, Vote] = {}  # of the open step
        self._parked = False
        self._streams = {
            peer.rank: AsyncStream[Vote | Leaving](
                link,
                Vote | Leaving,
                partial(self._heard, peer.rank),
                partial(self._died, peer.rank),
                MAX_FRAME_BYTES,
            )
            for peer, link in followers.items()
        }

    def _cast(self, vote: Vote) -> None:
        self._take(0, vote)

    def _heard(self, engine: int, msg: Vote | Leaving) -> None:
        if isinstance(msg, Leaving):
            self._left(engine, msg)
        elif engine in self._votes:
            raise ValueError(f"a second vote in step {self._step}")
        else:
            self._take(engine, msg)

    def _take(self, engine: int, vote: Vote) -> None:
        self._votes[engine] = vote
        if len(self._votes) == self._num_engines:
            self._distribute()
            return
        self._set_deadline()
        if self._parked:  # all sleep but this one: nobody may be woken twice, or miss it
            self._parked = False
            wake = frame(Wake(self._step))
            for other, stream in list(self._streams.items()):
                if other != engine:
                    stream.send(wake)
            self._wake()

    def _distribute(self) -> None:
        votes = [self._votes[engine] for engine in range(self._num_engines)]
        self._votes.clear()
        if self._streams:
            answer = frame(Votes(votes))
            for stream in list(self._streams.values()):
                stream.send(answer)
        if not self._lost.done():
            decision = self._finish(votes)
            self._parked = decision is not None and decision.action is Action.PARK

    def _overdue(self) -> None:
        silent = [engine for engine in range(self._num_engines) if engine not in self._votes]
        self._end(
            _engines_lost(
                self.members, silent, f"did not vote in step {self._step} of epoch {self.epoch}"
            )
        )


class _Follower(_Coordinator):
    """Any other engine: sends its votes to the leader and gets all of them back."""

    @classmethod
    async def open(cls, members: Members) -> "_Follower":
        """Connect to the leader."""
        try:
            async with asyncio.timeout(members.deadline_s):
                link = await connect(
                    _address(members), members.token, members.epoch, Peer(members.dp_rank)
                )
        except TimeoutError:
            cause = (
                f"did not open the vote of epoch {members.epoch} within {members.deadline_s:g} s"
            )
            raise _engines_lost(members, [0], cause) from None
        except ConnectionError as error:
            raise _engines_lost(members, [0], f"did not accept this engine: {error}") from None
        return cls(members, link)

    def __init__(self, members: Members, link: KeyedSocket) -> None:
        super().__init__(members)
        lost = partial(self._died, 0)
        self._streams[0] = AsyncStream(
            link, Votes | Wake | Leaving, self._heard, lost, MAX_FRAME_BYTES
        )

    def _cast(self, vote: Vote) -> None:
        self._set_deadline(FOLLOWER_WAITS)
        self._streams[0].send(frame(vote))

    def _heard(self, msg: Votes | Wake | Leaving) -> None:
        if isinstance(msg, Leaving):
            self._left(0, msg)
        elif isinstance(msg, Wake):
            if msg.step >= self._step:  # an older one is stale
                self._wake()
        elif self._voting:
            self._finish(msg.votes)
        else:
            raise ValueError(f"votes while this engine does not vote, in step {self._step}")

    def _overdue(self) -> None:
        self._end(
            _engines_lost(
                self.members, [0], f"did not answer in step {self._step} of epoch {self.epoch}"
            )
        )


def _address(members: Members) -> Address:
    return to_address(
        os.path.join(members.directory, "vote.sock") if members.one_host else members.vote
    )


def _listen(members: Members) -> StreamListener:
    address = _address(members)
    followers = map(Peer, range(1, members.size // members.tp_size))
    try:
        return StreamListener(address, members.token, members.epoch, followers)
    except OSError as error:
        cause = f"the step vote cannot listen at {address}: {error}"
        # A port may have been taken since it was chosen; the next epoch has another one.
        raise (ConfigError(cause) if members.one_host else PeerLost(cause)) from None


def _engines_lost(members: Members, engines: list[int], cause: str) -> PeerLost:
    """[1, 3] -> "engines 1, 3 did not ..." and the ranks of these engines."""
    names = f"engine{'s' if len(engines) > 1 else ''} {', '.join(map(str, engines))}"
    ranks = tuple(rank for rank in range(members.size) if rank // members.tp_size in engines)
    return PeerLost(f"{names} {cause}", ranks)
