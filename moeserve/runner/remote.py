"""The leader's side of an engine's other tensor-parallel ranks: processes of its own, which it tells what to do.

The thread that watches them lives as long as they do: the kernel kills a child whose starting thread ends.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Literal

import msgspec

from moeserve.actor.process import Child, Death, Forked
from moeserve.errors import ConfigError, EngineDied, PeerLost
from moeserve.messages import Traced
from moeserve.runner.orders import Failed, Far, Hello, Order, OrderDone, Progress, Report, WorkerChannel

log = logging.getLogger(__name__)

CONNECT_S = 60.0  # a machine that starts many processes at once is slow
END_S = 2.0  # for workers to end by themselves
SOCKET = "workers.sock"

Progressed = Callable[[int, str, int], None]  # tp_rank, phase, percent


class WorkerBirth(msgspec.Struct, frozen=True):
    """What a worker is told over its stdin."""

    address: str
    token: str
    tp_rank: int
    log_level: str
    log_format: Literal["text", "json"]


class Remote:
    """One worker, as its leader knows it. placed: how far it has prepared the pending placement."""

    def __init__(self, tp_rank: int, channel: WorkerChannel[Report]) -> None:
        self.tp_rank = tp_rank
        self.channel = channel
        self.placed = 0
        self.answers: dict[int, Future[OrderDone]] = {}
        self.failed: Failed | None = None
        self.reader: threading.Thread


class Team:
    """The workers of one engine, tensor-parallel ranks 1 to size - 1. `dead` is resolved with the cause when one of
    them ends without having been told to: then nothing can go on.

    command: starts a worker. directory: private, for the socket that they connect to; not needed any more after `meet`.
    forked: processes that wait to become the workers, if there are some. Life: `start`, `meet`, then `ask`.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: str,
        size: int,
        *,
        log_level: str = "info",
        log_format: Literal["text", "json"] = "text",
        forked: Sequence[Forked] = (),
    ) -> None:
        self.dead: Future[Exception] = Future()
        self.on_progress: Progressed = lambda tp_rank, name, percent: None
        self.pids: dict[int, int] = {}
        address, token = os.path.join(directory, SOCKET), secrets.token_hex(16)
        self._births = [WorkerBirth(address, token, rank, log_level, log_format) for rank in range(1, size)]
        self._command = command
        self._forked = forked
        self._listener = socket.socket(socket.AF_UNIX)
        self._remotes: list[Remote] = []
        self._lock = threading.Lock()  # all workers get all orders in the same order
        self._num_asked = 0
        self._closing = False
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._watching = threading.Event()
        self._watcher = threading.Thread(target=lambda: asyncio.run(self._watch()), name="tp workers", daemon=True)

    def start(self) -> None:
        """Starts the workers and returns at once. Raises ConfigError."""
        self._listener.bind(self._births[0].address)
        os.chmod(self._births[0].address, 0o600)
        self._listener.listen(len(self._births))
        self._watcher.start()
        self._watching.wait()
        self._check_alive()

    def meet(self) -> None:
        """Returns when all are connected. Raises EngineDied."""
        self._listener.settimeout(0.1)
        deadline_s = time.monotonic() + CONNECT_S
        while len(self._remotes) < len(self._births):
            self._check_alive()
            if time.monotonic() > deadline_s:
                raise EngineDied(f"tensor-parallel workers did not start within {CONNECT_S:g} s")
            with suppress(TimeoutError):
                self._greet(self._listener.accept()[0])
        self._listener.close()
        self._remotes.sort(key=lambda remote: remote.tp_rank)

    def _check_alive(self) -> None:
        if self.dead.done():
            raise self.dead.result()

    def ask(self, what: msgspec.Struct) -> list[Future[OrderDone]]:
        """Gives all workers an order; returns at once. The answers raise what ended a worker."""
        with self._lock:
            self._num_asked += 1
            order = Order(self._num_asked, what)  # type: ignore[arg-type]
            futures: list[Future[OrderDone]] = []
            for remote in self._remotes:
                future: Future[OrderDone] = Future()
                futures.append(future)
                if self.dead.done():
                    future.set_exception(self.dead.result())
                    continue
                remote.answers[order.seq] = future
                remote.channel.send(order)
        return futures

    @property
    def placed(self) -> int:
        """How far the slowest of them has prepared the pending placement."""
        return min(remote.placed for remote in self._remotes)

    def traced(self, done: Sequence[OrderDone], step: int, dp_rank: int) -> list[Traced]:
        """What the workers did in a step that was traced."""
        pairs = zip(self._remotes, done, strict=True)
        return [Traced(step, dp_rank, remote.tp_rank, list(one.events)) for remote, one in pairs]

    def close(self) -> None:
        """Ends the workers. From any thread, any number of times."""
        self._closing = True
        self._listener.close()
        for remote in self._remotes:
            remote.channel.close()
        if self._watcher.is_alive():
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._watcher.join()

    def _greet(self, sock: socket.socket) -> None:
        sock.settimeout(5.0)
        channel: WorkerChannel[Report] = WorkerChannel(sock, Report)
        hello = channel.receive()
        birth = self._births[0]
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token, birth.token):
            log.warning("a stranger connected to %s and was turned away", birth.address)
            channel.close()
            return
        sock.settimeout(None)
        remote = Remote(hello.tp_rank, channel)
        remote.reader = threading.Thread(target=self._read, args=(remote,), name=f"tp {hello.tp_rank}", daemon=True)
        self._remotes.append(remote)
        remote.reader.start()

    # Per worker: a thread that reads what it reports.

    def _read(self, remote: Remote) -> None:
        while (msg := remote.channel.receive()) is not None:
            match msg:
                case OrderDone():
                    remote.placed = msg.placed
                    if (future := remote.answers.pop(msg.seq, None)) is not None:
                        with suppress(InvalidStateError):  # nobody waits any more
                            future.set_result(msg)
                case Far(placed=placed):
                    remote.placed = placed
                case Progress(name=name, percent=percent):
                    self.on_progress(remote.tp_rank, name, percent)
                case Failed():
                    remote.failed = msg
        if not self._closing:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.call_later, END_S, self._end_silent, remote.tp_rank)

    # In the thread that watches.

    async def _watch(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._children: dict[int, Child] = {}
        watches: list[asyncio.Task[None]] = []
        try:
            for birth in self._births:
                child = self._start(f"tp worker {birth.tp_rank}", birth)
                self._children[birth.tp_rank] = child
                self.pids[birth.tp_rank] = child.pid
                watches.append(self._loop.create_task(self._await_death(birth.tp_rank, child)))
        except ConfigError as exc:
            self._declare_dead(exc)
        self._watching.set()
        await self._stop.wait()
        if watches:
            await asyncio.wait(watches, timeout=END_S)
        for child in self._children.values():
            if child.alive:
                child.kill("did not end with its engine")
        await asyncio.gather(*watches)

    def _start(self, name: str, birth: WorkerBirth) -> Child:
        document = msgspec.json.encode(birth)
        if self._forked:
            return Child.take(name, self._forked[birth.tp_rank - 1], document)
        return Child.start(name, self._command, document)

    async def _await_death(self, tp_rank: int, child: Child) -> None:
        death = await child.death()
        if not self._closing:
            self._declare_dead(self._cause(tp_rank, death))

    def _cause(self, tp_rank: int, death: Death) -> Exception:
        remote = next((one for one in self._remotes if one.tp_rank == tp_rank), None)
        if remote is not None:
            remote.reader.join(END_S)  # its last word may still be unread
            if remote.failed is not None and remote.failed.exit_code != 1:
                error = ConfigError(remote.failed.cause)
                error.exit_code = remote.failed.exit_code
                return error
            if remote.failed is not None:
                return EngineDied(f"tensor-parallel rank {tp_rank} failed: {remote.failed.cause}")
        return EngineDied(f"tensor-parallel rank {tp_rank} is gone: {death.summary}")

    def _declare_dead(self, cause: Exception) -> None:
        with self._lock:
            if self.dead.done():
                return
            self.dead.set_result(cause)
            waiting = [future for remote in self._remotes for future in remote.answers.values()]
            for remote in self._remotes:
                remote.answers.clear()
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(cause)

    def _end_silent(self, tp_rank: int) -> None:
        child = self._children[tp_rank]
        if child.alive:
            child.kill("closed the connection to its engine")


def all_done(futures: Sequence[Future[OrderDone]]) -> list[OrderDone]:
    """Waits for all answers. Raises PeerLost when an order failed because of another rank."""
    return checked([future.result() for future in futures])


def checked(done: Sequence[OrderDone]) -> list[OrderDone]:
    """Raises the first PeerLost among the answers."""
    for one in done:
        if one.lost:
            raise PeerLost(one.lost, one.missing)
    return list(done)
