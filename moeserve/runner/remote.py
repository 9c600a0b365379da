"""The leader's view of the other tensor-parallel ranks of its engine.

They are child processes (workers), to which the leader sends commands. The thread that starts and
watches them must live as long as they do, because the kernel kills a child when the thread that
started it ends.
"""

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import closing, suppress
from typing import Any, Literal

import msgspec

from moeserve.actor.process import Child, Death, Forked
from moeserve.actor.tasks import log_error, spawn
from moeserve.comm.stream import BlockingStream, Peer, StreamListener
from moeserve.errors import ConfigError, EngineDied, PeerLost
from moeserve.messages import Traced
from moeserve.runner import commands

END_TIMEOUT_S = 2.0  # time for workers to end by themselves
SOCKET = "workers.sock"


class RemoteWorker:
    """The leader's state of one worker."""

    def __init__(self, tp_rank: int, sock: socket.socket) -> None:
        self.tp_rank = tp_rank
        self.stream: BlockingStream[commands.Report] = BlockingStream(sock, commands.Report)
        self.prepared = 0  # its progress with the pending placement
        self.pending: dict[int, Future[commands.CommandDone]] = {}  # by `WorkerCommand.seq`
        self.failed: commands.Failed | None = None
        self.reader: threading.Thread


class Team:
    """The workers of one engine, tensor-parallel ranks 1 to size - 1.

    Call `start` and `wait_connected`, then `send`. The future `dead` gets the cause if a worker
    ends unexpectedly. The engine cannot continue then.

    command: the command line of a worker.
    directory: a private folder for the socket that workers connect to. It is not needed after
    `wait_connected`.
    forked: processes that wait to become workers. Without them, `command` is run.
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
        self.on_progress: Callable[[int, str, int], None] = lambda tp_rank, name, percent: None
        self.pids: dict[int, int] = {}
        address = os.path.join(directory, SOCKET)
        token = secrets.token_hex(16)
        self._births = [
            commands.WorkerBirth(address, token, rank, log_level, log_format)
            for rank in range(1, size)
        ]
        self._command = command
        self._forked = forked
        self._workers: list[RemoteWorker] = []
        self._connected: Future[None] = Future()
        self._lock = threading.Lock()  # so that all workers receive commands in the same order
        self._num_sent = 0
        self._closing = False
        self._children: dict[int, Child] = {}
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._started = threading.Event()
        self._watcher = threading.Thread(
            target=lambda: asyncio.run(self._watch()), name="tp workers", daemon=True
        )

    def start(self) -> None:
        """Start the workers without waiting for them.

        Raises ConfigError, or EngineDied if one has died already.
        """
        self._watcher.start()
        self._started.wait()
        self._raise_if_dead()

    def wait_connected(self) -> None:
        """Wait until all workers are connected. Raises EngineDied, or the ConfigError of a
        worker.
        """
        outcomes: list[Future[Any]] = [self._connected, self.dead]
        ended = wait(outcomes, commands.CONNECT_TIMEOUT_S, FIRST_COMPLETED).done
        self._raise_if_dead()
        if not ended:
            raise EngineDied(
                f"tensor-parallel workers did not start within {commands.CONNECT_TIMEOUT_S:g} s"
            )

    def send(self, what: msgspec.Struct) -> list[Future[commands.CommandDone]]:
        """Send a command to all workers. Return one future per worker, which raises if the engine
        dies.
        """
        with self._lock:
            self._num_sent += 1
            command = commands.WorkerCommand(self._num_sent, what)  # type: ignore[arg-type]
            futures: list[Future[commands.CommandDone]] = []
            for worker in self._workers:
                future: Future[commands.CommandDone] = Future()
                futures.append(future)
                if self.dead.done():
                    future.set_exception(self.dead.result())
                    continue
                worker.pending[command.seq] = future
                worker.stream.send(command)
        return futures

    @property
    def prepared(self) -> int:
        """The progress of the slowest worker with the pending placement."""
        return min(worker.prepared for worker in self._workers)

    def traced(self, done: Sequence[commands.CommandDone], step: int, dp_rank: int) -> list[Traced]:
        """Return the traces of the workers in a traced step."""
        pairs = zip(self._workers, done, strict=True)
        return [
            Traced(step, dp_rank, worker.tp_rank, list(answer.events)) for worker, answer in pairs
        ]

    def close(self) -> None:
        """End the workers. May be called from any thread, and repeatedly."""
        self._closing = True
        for worker in self._workers:
            worker.stream.close()
        if self._watcher.is_alive():
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._watcher.join()

    def _raise_if_dead(self) -> None:
        if self.dead.done():
            raise self.dead.result()

    # In a thread per worker.

    def _read(self, worker: RemoteWorker) -> None:
        while (msg := worker.stream.receive()) is not None:
            match msg:
                case commands.CommandDone():
                    if msg.prepared is not None:
                        worker.prepared = msg.prepared
                    if (future := worker.pending.pop(msg.seq, None)) is not None:
                        with suppress(InvalidStateError):  # nobody waits any more
                            future.set_result(msg)
                case commands.Prepared(prepared=prepared):
                    worker.prepared = prepared
                case commands.LoadProgress(name=name, percent=percent):
                    self.on_progress(worker.tp_rank, name, percent)
                case commands.Failed():
                    worker.failed = msg
        if not self._closing:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(
                    self._loop.call_later, END_TIMEOUT_S, self._kill_if_alive, worker.tp_rank
                )

    # In the thread that watches.

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        accepting: asyncio.Task[None] | None = None
        deaths: list[asyncio.Task[None]] = []
        try:
            address = self._births[0].address
            token = self._births[0].token
            with ConfigError.instead_of(
                OSError, f"cannot listen for tensor-parallel workers at {address}"
            ):
                listener = StreamListener(
                    address, token, 0, [Peer(birth.tp_rank) for birth in self._births]
                )
            accepting = spawn(
                self._accept(listener), name="accept tp workers", on_error=self._task_failed
            )
            for birth in self._births:
                child = self._children[birth.tp_rank] = self._start_child(
                    f"tp worker {birth.tp_rank}", birth
                )
                self.pids[birth.tp_rank] = child.pid
                deaths.append(
                    spawn(
                        self._await_death(birth.tp_rank, child),
                        name=f"watch tp worker {birth.tp_rank}",
                        on_error=self._task_failed,
                    )
                )
        except ConfigError as exc:
            self._declare_dead(exc)
        self._started.set()
        await self._stop.wait()
        if accepting is not None:
            accepting.cancel()
        if deaths:
            await asyncio.wait(deaths, timeout=END_TIMEOUT_S)
        for child in self._children.values():
            if child.alive:
                child.kill("did not end with its engine")
        await asyncio.gather(*deaths, return_exceptions=True)

    def _task_failed(self, name: str, error: Exception) -> None:
        """End the engine, because without this task the death of a worker would go unnoticed."""
        log_error(name, error)
        self._declare_dead(EngineDied(f"{name}: {type(error).__name__}: {error}"))

    async def _accept(self, listener: StreamListener) -> None:
        with closing(listener):
            await listener.complete.wait()
        self._workers = [
            RemoteWorker(peer.number, link.sock) for peer, link in sorted(listener.accepted.items())
        ]
        for worker in self._workers:
            name = f"tp {worker.tp_rank}"
            worker.reader = threading.Thread(
                target=self._read, args=(worker,), name=name, daemon=True
            )
            worker.reader.start()
        self._connected.set_result(None)

    def _start_child(self, name: str, birth: commands.WorkerBirth) -> Child:
        document = msgspec.json.encode(birth)
        if self._forked:
            return Child.take(name, self._forked[birth.tp_rank - 1], document)
        return Child.start(name, self._command, document)

    async def _await_death(self, tp_rank: int, child: Child) -> None:
        death = await child.death()
        if not self._closing:
            self._declare_dead(self._cause(tp_rank, death))

    def _cause(self, tp_rank: int, death: Death) -> Exception:
        worker = next((worker for worker in self._workers if worker.tp_rank == tp_rank), None)
        if worker is not None:
            worker.reader.join(END_TIMEOUT_S)  # so that its last message has been read
            # Exit code 1 is an unexpected error. The other codes are those of ConfigErrors.
            if worker.failed is not None and worker.failed.exit_code != 1:
                error = ConfigError(worker.failed.cause)
                error.exit_code = worker.failed.exit_code
                return error
            if worker.failed is not None:
                return EngineDied(f"tensor-parallel rank {tp_rank} failed: {worker.failed.cause}")
        return EngineDied(f"tensor-parallel rank {tp_rank} is gone: {death.summary}")

    def _declare_dead(self, cause: Exception) -> None:
        with self._lock:
            if self.dead.done():
                return
            self.dead.set_result(cause)
            pending = [future for worker in self._workers for future in worker.pending.values()]
            for worker in self._workers:
                worker.pending.clear()
        for future in pending:
            with suppress(InvalidStateError):
                future.set_exception(cause)

    def _kill_if_alive(self, tp_rank: int) -> None:
        child = self._children[tp_rank]
        if child.alive:
            child.kill("closed the connection to its engine")


def all_done(futures: Sequence[Future[commands.CommandDone]]) -> list[commands.CommandDone]:
    """Wait for all results. Raises PeerLost if a command failed because of another rank."""
    return raise_if_lost([future.result() for future in futures])


def raise_if_lost(done: Sequence[commands.CommandDone]) -> list[commands.CommandDone]:
    """Raise the first PeerLost among the results. Return them otherwise."""
    for result in done:
        if result.lost:
            raise PeerLost(result.lost, result.missing)
    return list(done)
