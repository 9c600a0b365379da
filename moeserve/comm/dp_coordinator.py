"""The vote of data-parallel engines on each step: what to do, and how many tokens each has.

Engine 0 is the leader, and each other engine (a follower) has one stream to it. Followers send
their votes to the leader, which sends all votes back. Each engine computes the decision from them.

On one host, the streams are Unix sockets in the members' directory; between hosts, they are
encrypted TCP connections. All of it runs on the caller's event loop, so a vote takes one message
and one wake-up, without another thread.
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
# A follower's deadline is longer by this factor, so that the leader, which knows who is silent,
# reports it first.
FOLLOWER_FACTOR = 1.25
# The first vote's deadline is longer by this factor, because engines may still load experts.
FIRST_VOTE_FACTOR = 10


class Votes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The votes of all engines, in rank order. From the leader to followers."""

    votes: list[Vote]


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Another engine has voted in this step, so parked engines must vote, too. From the leader to
    followers.
    """

    step: int


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The sender leaves. The last message of a stream, in both directions."""

    cause: str
    missing: tuple[int, ...]  # the lost ranks that the sender knows of


async def open_coordinator(members: Members) -> DPCoordinator:
    """Connect to the other engines.

    Each engine's tp_rank 0 calls this, on the event loop on which it will vote. Raises PeerLost
    with the engines that did not connect, and ConfigError if this machine cannot listen.
    """
    if members.size == members.tp_size:
        return _Leader(members, {})
    if members.dp_rank == 0:
        return await _Leader.open(members)
    return await _Follower.open(members)


class _Coordinator:
    """The base of leader and follower: the open vote with its deadline, waking, and closing."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.epoch = members.epoch
        self._loop = asyncio.get_running_loop()
        self._step = 0  # the step of the open vote, or else of the next one
        self._decision: asyncio.Future[Decision] | None = None  # of the open vote
        # Another engine has voted in the next step, or the group is lost.
        self._wake_event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # the open vote's deadline
        self._lost: asyncio.Future[PeerLost] = self._loop.create_future()
        self._streams: dict[int, AsyncStream[Any]] = {}  # engine -> stream

    @property
    def is_woken(self) -> bool:
        """Whether another engine has voted in the next step, after a decision to sleep
        (`Action.PARK`), and waits for this engine's vote.
        """
        return self._wake_event.is_set() and not self._lost.done()

    @property
    def lost(self) -> PeerLost | None:
        """The error that broke the group; None while it works."""
        return self._lost.result() if self._lost.done() else None

    async def wait_lost(self) -> None:
        """Wait until the group is broken."""
        await asyncio.shield(self._lost)

    async def decide(self, vote: Vote) -> Decision:
        """Vote, and return the decision of all engines. Raises PeerLost or StepSkew."""
        assert self._decision is None, "one vote at a time"
        assert vote.epoch == self.epoch, (vote.epoch, self.epoch)
        self._raise_if_lost()
        self._wake_event.clear()
        self._decision = self._loop.create_future()
        self._submit(vote)
        try:
            return await self._decision
        except asyncio.CancelledError:
            # The other engines' votes are lost, so this engine cannot take part any more.
            self.close()
            raise
        finally:
            self._decision = None

    async def wait_woken(self) -> None:
        """Wait until `is_woken` is true. Raises PeerLost."""
        await self._wake_event.wait()
        self._raise_if_lost()

    def close(self, cause: str = "", missing: tuple[int, ...] = ()) -> None:
        """Close the connections. The cause and the missing ranks are sent to the other engines."""
        self._lose_group(PeerLost(cause or "this engine left the vote", missing))

    def _submit(self, vote: Vote) -> None:
        """Submit this engine's vote."""
        raise NotImplementedError

    def _on_deadline(self) -> None:
        """End the group, because the open vote's deadline has passed."""
        raise NotImplementedError

    def _raise_if_lost(self) -> None:
        if (lost := self.lost) is not None:
            raise PeerLost(str(lost), lost.missing)

    @property
    def _is_voting(self) -> bool:
        return self._decision is not None and not self._decision.done()

    def _wake(self) -> None:
        if not self._is_voting:
            self._wake_event.set()

    def _start_timer(self, factor: float = 1.0) -> None:
        """Start the timer of the open vote, unless it runs. factor: of the members' deadline."""
        if self._timer is not None:
            return
        if self._step == 0:
            factor *= FIRST_VOTE_FACTOR
        timeout_s = factor * self.members.deadline_s
        self._timer = self._loop.call_later(timeout_s, self._on_deadline)

    def _finish_vote(self, votes: list[Vote]) -> Decision | None:
        """Set the open vote's decision and return it.

        Return None if the votes do not match, or if the vote was cancelled.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert self._decision is not None
        if self._decision.done():  # it was cancelled, and `decide` will close the connections
            return None
        self._step += 1
        try:
            decision = decide(votes)
        except StepSkew as error:
            self._decision.set_exception(error)
            return None
        self._decision.set_result(decision)
        return decision

    def _lose_group(self, lost: PeerLost) -> None:
        """Close the connections, and fail the open vote. Only the first call has an effect."""
        if self._lost.done():
            return
        self._lost.set_result(lost)
        if self._timer is not None:
            self._timer.cancel()
        leaving = frame(Leaving(str(lost)[:2000], lost.missing[:1000]))
        for stream in self._streams.values():
            stream.send(leaving)
            stream.close()
        self._wake_event.set()
        if self._decision is not None and not self._decision.done():
            self._decision.set_exception(PeerLost(str(lost), lost.missing))

    def _on_leaving(self, engine: int, leaving: Leaving) -> None:
        self._lose_group(PeerLost(f"engine {engine} left: {leaving.cause}", leaving.missing))

    def _on_stream_lost(self, engine: int, cause: str) -> None:
        self._lose_group(_engines_lost(self.members, [engine], cause))


class _Leader(_Coordinator):
    """Engine 0, which collects all votes and sends them to its followers, if it has any."""

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
        self._votes: dict[int, Vote] = {}  # engine -> its vote in the open step
        self._is_parked = False  # the last decision was PARK, and no engine has voted since
        self._streams = {
            peer.rank: AsyncStream[Vote | Leaving](
                link,
                Vote | Leaving,
                partial(self._on_message, peer.rank),
                partial(self._on_stream_lost, peer.rank),
                MAX_FRAME_BYTES,
            )
            for peer, link in followers.items()
        }

    def _submit(self, vote: Vote) -> None:
        self._add_vote(0, vote)

    def _on_message(self, engine: int, msg: Vote | Leaving) -> None:
        if isinstance(msg, Leaving):
            self._on_leaving(engine, msg)
        elif engine in self._votes:
            # The stream reports it as invalid data and breaks.
            raise ValueError(f"a second vote in step {self._step}")
        else:
            self._add_vote(engine, msg)

    def _add_vote(self, engine: int, vote: Vote) -> None:
        self._votes[engine] = vote
        if len(self._votes) == self._num_engines:
            self._distribute()
            return
        self._start_timer()
        if self._is_parked:  # this is the first vote since: wake all other engines, once
            self._is_parked = False
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
            decision = self._finish_vote(votes)
            self._is_parked = decision is not None and decision.action is Action.PARK

    def _on_deadline(self) -> None:
        silent = [engine for engine in range(self._num_engines) if engine not in self._votes]
        self._lose_group(
            _engines_lost(
                self.members, silent, f"did not vote in step {self._step} of epoch {self.epoch}"
            )
        )


class _Follower(_Coordinator):
    """Any other engine, which sends its votes to the leader and receives all votes from it."""

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
        self._streams[0] = AsyncStream(
            link,
            Votes | Wake | Leaving,
            self._on_message,
            partial(self._on_stream_lost, 0),
            MAX_FRAME_BYTES,
        )

    def _submit(self, vote: Vote) -> None:
        self._start_timer(FOLLOWER_FACTOR)
        self._streams[0].send(frame(vote))

    def _on_message(self, msg: Votes | Wake | Leaving) -> None:
        if isinstance(msg, Leaving):
            self._on_leaving(0, msg)
        elif isinstance(msg, Wake):
            if msg.step >= self._step:  # otherwise it is stale
                self._wake()
        elif self._is_voting:
            self._finish_vote(msg.votes)
        else:
            # The stream reports it as invalid data and breaks.
            raise ValueError(f"votes while this engine does not vote, in step {self._step}")

    def _on_deadline(self) -> None:
        self._lose_group(
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
        # Another process may have taken the port since it was chosen. The next epoch has another.
        raise (ConfigError(cause) if members.one_host else PeerLost(cause)) from None


def _engines_lost(members: Members, engines: list[int], cause: str) -> PeerLost:
    """Return the error for lost engines, with their ranks.

    [1, 3], "did not ..." -> "engines 1, 3 did not ..."
    """
    names = f"engine{'s' if len(engines) > 1 else ''} {', '.join(map(str, engines))}"
    ranks = tuple(rank for rank in range(members.size) if rank // members.tp_size in engines)
    return PeerLost(f"{names} {cause}", ranks)
