"""The vote of data-parallel engines on each step (see engine/vote.py).

Each engine votes with the state of its scheduler, such as its number of tokens. The decision is
what all engines do in the step.

Engine 0 is the leader, and each other engine (a follower) has one stream to it. Followers send
their votes to the leader, which sends all votes back. Each engine computes the decision from them.

On one host, the streams are Unix sockets in the members' directory; between hosts, they are
encrypted TCP connections. The streams run on the caller's event loop, without another thread. So a
follower sends one message per vote, and wakes up once.
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
    """The votes of all engines, ordered by engine. The leader sends them to its followers."""

    votes: list[Vote]


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The call to vote in this step, because another engine has. The leader sends it to followers
    that are parked (`Action.PARK`).
    """

    step: int


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The sender leaves. The last message of a stream, in both directions."""

    cause: str
    missing_ranks: tuple[int, ...]  # the lost ranks that the sender knows of


async def open_coordinator(members: Members) -> DPCoordinator:
    """Connect to the other engines.

    Each engine's tp_rank 0 calls this, on the event loop on which it will vote. Raises PeerLost
    with the engines that did not connect, and ConfigError if this machine cannot listen.
    """
    if members.num_engines == 1:
        return _Leader(members, followers={})
    if members.dp_rank == 0:
        return await _Leader.open(members)
    return await _Follower.open(members)


class _Coordinator:
    """The base of leader and follower: the open vote with its deadline, waking, and closing."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.epoch = members.epoch
        self._loop = asyncio.get_running_loop()
        self._step = 0  # the step of the open vote, or of the next vote if none is open
        self._decision: asyncio.Future[Decision] | None = None  # of the open vote
        # Set if another engine has voted in the next step, and if the group is lost.
        self._wake_event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # the open vote's deadline
        self._lost: asyncio.Future[PeerLost] = self._loop.create_future()
        self._streams: dict[int, AsyncStream[Any]] = {}  # engine -> stream

    @property
    def is_woken(self) -> bool:
        """Whether this engine is parked (`Action.PARK`) and another engine has already voted in the
        next step. That engine waits for this engine's vote.
        """
        return self._wake_event.is_set() and not self._lost.done()

    @property
    def lost(self) -> PeerLost | None:
        """The error that broke the group; None while it works."""
        return self._lost.result() if self._lost.done() else None

    async def wait_lost(self) -> None:
        """Wait until the group is broken."""
        await asyncio.shield(self._lost)

    async def exchange(self, vote: Vote) -> Decision:
        """Vote, wait for all votes, and return the decision. Raises PeerLost or StepSkew."""
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

    def close(self, cause: str = "", missing_ranks: tuple[int, ...] = ()) -> None:
        """Close the connections. The cause and the missing ranks are sent to the other engines."""
        self._lose_group(PeerLost(cause or "this engine left the vote", missing_ranks))

    def _submit(self, vote: Vote) -> None:
        """Submit this engine's vote."""
        raise NotImplementedError

    def _on_deadline(self) -> None:
        """Lose the group, because the open vote's deadline has passed."""
        raise NotImplementedError

    def _raise_if_lost(self) -> None:
        if (lost := self.lost) is not None:
            # A copy, because each raise of an exception extends its traceback.
            raise PeerLost(str(lost), lost.missing)

    @property
    def _is_voting(self) -> bool:
        return self._decision is not None and not self._decision.done()

    def _wake(self) -> None:
        if not self._is_voting:
            self._wake_event.set()

    def _start_timer(self, deadline_factor: float = 1.0) -> None:
        """Start the timer of the open vote, unless it runs.

        deadline_factor: the timeout as a multiple of the members' deadline.
        """
        if self._timer is not None:
            return
        if self._step == 0:
            deadline_factor *= FIRST_VOTE_FACTOR
        timeout_s = deadline_factor * self.members.deadline_s
        self._timer = self._loop.call_later(timeout_s, self._on_deadline)

    def _finish_vote(self, votes: list[Vote]) -> Decision | None:
        """Set the open vote's decision and return it.

        Return None if the votes do not match, or if the vote was cancelled.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert self._decision is not None
        if self._decision.done():  # it was cancelled, and `exchange` will close the connections
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
        # Cut, because a frame may have MAX_FRAME_BYTES at most.
        leaving = frame(Leaving(cause=str(lost)[:2000], missing_ranks=lost.missing[:1000]))
        for stream in self._streams.values():
            stream.send(leaving)
            stream.close()
        self._wake_event.set()
        if self._decision is not None and not self._decision.done():
            self._decision.set_exception(PeerLost(str(lost), lost.missing))

    def _on_leaving(self, engine: int, leaving: Leaving) -> None:
        cause = f"engine {engine} left: {leaving.cause}"
        self._lose_group(PeerLost(cause, leaving.missing_ranks))

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
            except TimeoutError:
                _close_accepted(listener)
                missing_engines = sorted(peer.number for peer in listener.missing_peers)
                cause = (
                    f"did not come to the vote of epoch {members.epoch} within"
                    f" {members.deadline_s:g} s"
                )
                raise _engines_lost(members, missing_engines, cause) from None
            except BaseException:
                _close_accepted(listener)
                raise

    def __init__(self, members: Members, followers: dict[Peer, KeyedSocket]) -> None:
        super().__init__(members)
        self._num_engines = len(followers) + 1
        self._votes: dict[int, Vote] = {}  # engine -> its vote in the open step
        # Whether all engines are parked: the last decision was PARK, and none has voted since.
        self._all_parked = False
        self._streams = {
            peer.number: AsyncStream[Vote | Leaving](
                link,
                receives=Vote | Leaving,
                on_message=partial(self._on_message, peer.number),
                on_lost=partial(self._on_stream_lost, peer.number),
                max_bytes=MAX_FRAME_BYTES,
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
        if self._all_parked:  # this is the first vote since: wake all other engines, once
            self._all_parked = False
            wake = frame(Wake(self._step))
            for other, stream in self._streams.items():
                if other != engine:
                    stream.send(wake)
            self._wake()  # this engine; has no effect if the vote is its own

    def _distribute(self) -> None:
        votes = [self._votes[engine] for engine in range(self._num_engines)]
        self._votes.clear()
        if self._streams:
            all_votes = frame(Votes(votes))
            for stream in self._streams.values():
                stream.send(all_votes)
        if not self._lost.done():  # a failed `send` loses the group, and fails the open vote
            decision = self._finish_vote(votes)
            self._all_parked = decision is not None and decision.action is Action.PARK

    def _on_deadline(self) -> None:
        silent_engines = [
            engine for engine in range(self._num_engines) if engine not in self._votes
        ]
        cause = f"did not vote in step {self._step} of epoch {self.epoch}"
        self._lose_group(_engines_lost(self.members, silent_engines, cause))


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
            receives=Votes | Wake | Leaving,
            on_message=self._on_message,
            on_lost=partial(self._on_stream_lost, 0),
            max_bytes=MAX_FRAME_BYTES,
        )

    def _submit(self, vote: Vote) -> None:
        self._start_timer(FOLLOWER_FACTOR)
        self._streams[0].send(frame(vote))

    def _on_message(self, msg: Votes | Wake | Leaving) -> None:
        if isinstance(msg, Leaving):
            self._on_leaving(0, msg)
        elif isinstance(msg, Wake):
            if msg.step >= self._step:  # otherwise this engine has voted in that step meanwhile
                self._wake()
        elif self._is_voting:
            self._finish_vote(msg.votes)
        else:
            # The stream reports it as invalid data and breaks.
            raise ValueError(f"votes while this engine does not vote, in step {self._step}")

    def _on_deadline(self) -> None:
        cause = f"did not answer in step {self._step} of epoch {self.epoch}"
        self._lose_group(_engines_lost(self.members, [0], cause))


def _address(members: Members) -> Address:
    if members.one_host:
        return os.path.join(members.directory, "vote.sock")
    return to_address(members.vote)


def _listen(members: Members) -> StreamListener:
    address = _address(members)
    followers = map(Peer, range(1, members.num_engines))
    try:
        return StreamListener(address, members.token, members.epoch, followers)
    except OSError as error:
        cause = f"the step vote cannot listen at {address}: {error}"
        if members.one_host:
            raise ConfigError(cause) from None
        # Another process may have taken the port since it was chosen. The next epoch has another.
        raise PeerLost(cause) from None


def _close_accepted(listener: StreamListener) -> None:
    for link in listener.accepted.values():
        link.sock.close()


def _engines_lost(members: Members, engines: list[int], cause: str) -> PeerLost:
    """Return the error for lost engines, with their ranks.

    [1, 3], "did not ..." -> "engines 1, 3 did not ..."
    """
    names = f"engine{'s' if len(engines) > 1 else ''} {', '.join(map(str, engines))}"
    ranks = tuple(rank for rank in range(members.size) if rank // members.tp_size in engines)
    return PeerLost(f"{names} {cause}", ranks)
