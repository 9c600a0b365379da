"""A torch `Store` over authenticated streams, with which the ranks of an epoch exchange addresses.

    rank r  -- Put -->  rank 0  -- Put -->  all others

Every rank keeps a copy of all values, so only `set` sends a message. Only the methods that Gloo and
NCCL call are implemented; both set each key once, on one rank.

The differences from torch's TCPStore:
- Only members can connect, and streams between machines are encrypted.
- It does not use DNS.
- If a rank does not connect, all others report its number.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch.distributed

from moeserve.comm.dp_coordinator import FOLLOWER_FACTOR, Leaving
from moeserve.comm.members import Members
from moeserve.comm.stream import (
    AsyncStream,
    KeyedSocket,
    Peer,
    StreamListener,
    connect,
    frame,
    to_address,
)
from moeserve.errors import PeerLost

log = logging.getLogger(__name__)

dist: Any = torch.distributed  # its type hints lack most of what is used here


class Put(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A new key and its value. Sent in both directions."""

    key: str
    value: bytes


class MembersStore(dist.Store):  # type: ignore[misc]
    """The store of an epoch. Rank 0 listens at `members.store`, and a thread runs the streams.

    `get` and `wait` raise PeerLost with the ranks that did not connect or are gone.
    """

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members
        self._address = to_address(members.store)
        self._values: dict[str, bytes] = {}
        self._cause: PeerLost | None = None  # why the store was closed
        # Held to write `_values` and `_cause`, and to wait for them.
        self._condition = threading.Condition()
        self._streams: dict[int, AsyncStream[Put | Leaving]] = {}
        self._loop = asyncio.new_event_loop()
        # `_serve` itself handles its errors by closing the store.
        self._serving = self._loop.create_task(self._serve())
        threading.Thread(target=self._run, name="store", daemon=True).start()

    def set(self, key: str, value: bytes) -> None:
        """Set a key's value on all ranks, including those that connect later."""
        put = Put(key, value)
        self._set_locally(put)
        with suppress(RuntimeError):  # the store is closed, which `wait` reports
            self._loop.call_soon_threadsafe(self._send, put)

    def get(self, key: str) -> bytes:
        """Wait until a key has a value, and return it."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        """Wait until all keys have values.

        limit: by default longer than rank 0's deadline, so that rank 0, which knows the missing
        ranks, reports them first.
        """
        timeout_s = FOLLOWER_FACTOR * self._members.deadline_s
        if limit is not None:
            timeout_s = limit.total_seconds()
        with self._condition:
            self._condition.wait_for(lambda: self.check(keys) or self._cause is not None, timeout_s)
            if not self.check(keys):
                missing_keys = ", ".join(key for key in keys if key not in self._values)
                if self._cause is not None:
                    raise self._cause
                raise PeerLost(
                    f"the store was told nothing of {missing_keys} within {timeout_s:g} s"
                )

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return all(key in self._values for key in keys)

    def clone(self) -> "MembersStore":
        """Return this store, which any thread may use."""
        return self

    def close(self, cause: PeerLost | None = None) -> None:
        """Close the connections, from any thread, and send the cause to the other ranks.

        cause: by default that this rank left the group. Only the cause of the first call counts.
        """
        with self._condition:
            if self._cause is None:
                self._cause = cause or PeerLost("this rank left the group")
            self._condition.notify_all()
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._serving.cancel)

    # The methods below run in the store's thread. Only `_set_locally` is called by any thread.

    def _run(self) -> None:
        with closing(self._loop), suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        try:
            if self._members.rank == 0:
                await self._accept()
            else:
                await self._connect()
            # Send what was set before the streams were open.
            for key, value in list(self._values.items()):
                self._send(Put(key, value))
            await self._loop.create_future()  # until `close` cancels this task
        except PeerLost as error:
            self.close(error)
        except OSError as error:
            self.close(PeerLost(f"cannot use the store at {self._members.store}: {error}"))
        except Exception as error:
            log.exception("the store failed")
            self.close(PeerLost(f"the store of this rank failed: {error!r}"))
        finally:
            assert self._cause is not None  # only `close` ends this task
            self._send(Leaving(str(self._cause), self._cause.missing))
            streams = list(self._streams.values())
            for stream in streams:
                stream.close()
            await asyncio.gather(*(stream.wait_closed() for stream in streams))

    async def _accept(self) -> None:
        members = self._members
        others = map(Peer, range(1, members.size))
        with closing(
            StreamListener(self._address, members.token, members.epoch, others)
        ) as listener:
            try:
                await asyncio.wait_for(listener.complete.wait(), members.deadline_s)
            except TimeoutError:
                missing_ranks = tuple(sorted(peer.number for peer in listener.missing_peers))
                raise PeerLost(
                    f"ranks {[*missing_ranks]} did not come within {members.deadline_s:g} s",
                    missing_ranks,
                ) from None
            finally:  # the ranks that did come must get the cause, too
                for peer, link in listener.accepted.items():
                    self._open_stream(peer.number, link)

    async def _connect(self) -> None:
        members = self._members
        connecting = connect(self._address, members.token, members.epoch, Peer(members.rank))
        try:
            self._open_stream(0, await asyncio.wait_for(connecting, members.deadline_s))
        except OSError as error:
            cause = str(error) or f"nobody listened within {members.deadline_s:g} s"
            raise PeerLost(
                f"rank 0 did not open the store at {members.store}: {cause}", (0,)
            ) from None

    def _open_stream(self, rank: int, link: KeyedSocket) -> None:
        def on_lost(cause: str) -> None:
            self.close(PeerLost(f"rank {rank} {cause}", (rank,)))

        self._streams[rank] = AsyncStream(
            link,
            receives=Put | Leaving,
            on_message=partial(self._on_message, rank),
            on_lost=on_lost,
        )

    def _on_message(self, rank: int, msg: Put | Leaving) -> None:
        if isinstance(msg, Leaving):
            self.close(PeerLost(f"rank {rank} left: {msg.cause}", msg.missing_ranks))
        else:
            self._set_locally(msg)
            self._send(msg, except_rank=rank)

    def _set_locally(self, put: Put) -> None:
        with self._condition:
            self._values[put.key] = put.value
            self._condition.notify_all()

    def _send(self, msg: Put | Leaving, except_rank: int = -1) -> None:
        data = frame(msg)
        for rank, stream in list(self._streams.items()):
            if rank != except_rank:
                stream.send(data)
