"""`moeserve serve --node-rank i`: the agent of a machine that is not machine 0. It answers no HTTP.

It presents itself at the rendezvous, starts the engines that machine 0 orders, and tells of their ends. Its engines end
with it, and it ends with machine 0. Exit codes: 0 when machine 0 was told to stop or we were, 1 when machine 0 is lost,
2 when we cannot join.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

import msgspec

from moeserve.actor.inbox import Inbox
from moeserve.actor.keys import Keys, keys_of, read_secret, token_of
from moeserve.actor.process import Child, Death, to_stderr
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, connect
from moeserve.cluster.assemble import in_thread
from moeserve.cluster.check_parallel import check_machines, rendezvous_of
from moeserve.cluster.forks import ForkedEngine, Forks
from moeserve.cluster.host import Ended, Farewell, FromNode, Keep, LogLine, Signal, Start, Started, ToNode
from moeserve.cluster.logs import set_up_logging
from moeserve.cluster.order import EngineOrder
from moeserve.cluster.rendezvous import TOKEN, Admitted, Attendance, TurnedAway, attendance, bracketed, resolve
from moeserve.cluster.rundir import RunDir
from moeserve.config import Config
from moeserve.errors import ActorStopped, ConfigError, EngineDied, Overloaded

log = logging.getLogger(__name__)

JOIN_S = 4.0  # from the process's own start: less than 5 s until we say what is wrong
ATTEMPT_S = 1.0  # at least, however slow the start was
AGAIN_S = 0.1
TERM_S = 3600.0  # SIGTERM lets an engine finish; machine 0 knows how long


def serve_node(config: Config) -> int:
    """Runs until machine 0 lets us go or a signal comes. Raises ConfigError, or EngineDied if machine 0 is lost."""
    set_up_logging(config.server.log_level, config.server.log_format)
    check_machines(config.parallel)
    return asyncio.run(_until_signal(config))


async def _until_signal(config: Config) -> int:
    task = asyncio.ensure_future(_live(config))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("told to stop")
    return 0


async def _live(config: Config) -> None:
    deadline_s = time.monotonic() + max(ATTEMPT_S, JOIN_S - _age_s())
    keys_file = str(config.parallel.cluster_key_file)
    secret = read_secret(keys_file)
    run_dir = RunDir()
    try:
        facts = await in_thread("model", lambda: attendance(config, run_dir.path))
        admitted = await join(config, secret, facts, deadline_s)
        await _Agent(config).serve(admitted, keys_of(secret))
    finally:
        run_dir.close()


async def join(config: Config, secret: bytes, facts: Attendance, deadline_s: float) -> Admitted:
    """Tries until the deadline (monotonic). Raises ConfigError with machine 0's reason, or why nothing was heard."""
    host, port = rendezvous_of(config.parallel)
    cause = f"the name {host!r} was not resolved in time"
    with suppress(TimeoutError):
        async with asyncio.timeout_at(_on_loop(deadline_s)):
            address = f"tcp://{bracketed(await in_thread('resolve', lambda: resolve(host)))}:{port}"
            cause = f"no answer from {address}: check --rendezvous, and that firewalls let its port through"
            while True:
                answer = await _ask(address, secret, facts)
                if isinstance(answer, Admitted):
                    return answer
                if isinstance(answer, TurnedAway):
                    raise ConfigError(f"machine 0 turned this machine away: {answer.cause}")
                cause = answer.cause
                if cause.startswith("nobody listens"):
                    cause += ": start machine 0 first, or check --rendezvous"
                await asyncio.sleep(AGAIN_S)
    raise ConfigError(f"machine {facts.node_rank} could not join: {cause}")


def _age_s() -> float:
    """Of this process, Python's own start included; 0 where there is no /proc."""
    try:
        begun = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # in ticks since the boot
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun / os.sysconf("SC_CLK_TCK")


def _on_loop(monotonic_s: float) -> float:
    return asyncio.get_running_loop().time() + monotonic_s - time.monotonic()


async def _ask(address: str, secret: bytes, facts: Attendance) -> Admitted | TurnedAway | PeerGone:
    """One attempt. PeerGone: nobody answered, for this reason."""
    inbox: Inbox[Admitted | TurnedAway | PeerGone] = Inbox("rendezvous")
    token, keys = token_of(secret, TOKEN), keys_of(secret)
    wire = connect(address, token=token, receives=Admitted | TurnedAway, inbox=inbox, keys=keys)
    try:
        wire.send(facts)  # after the hello
        return (await inbox.drain(wait=True))[0]
    finally:
        wire.close()


class _Agent:
    """Starts, ends and watches engines by machine 0's orders."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._children: dict[int, Child | ForkedEngine] = {}
        self._forks = Forks()
        self._tasks: set[asyncio.Task[object]] = set()
        self._wire: ZmqWire[FromNode, ToNode | PeerGone]

    async def serve(self, admitted: Admitted, keys: Keys) -> None:
        """Returns when machine 0 says farewell. Raises EngineDied if it fails or is lost."""
        inbox: Inbox[ToNode | PeerGone] = Inbox("machine 0")
        self._wire = connect(admitted.address, token=admitted.token, receives=ToNode, inbox=inbox, keys=keys)
        try:
            await self._wire.connected(JOIN_S)
            log.info("this is machine %d; machine 0 is in charge", self._config.parallel.node_rank)
            async for msg in inbox:
                match msg:
                    case Start():
                        self._start(msg)
                    case Signal():
                        self._signal(msg)
                    case Keep(tp_size=tp_size):
                        self._forks.keep(tp_size)
                    case Farewell(cause=""):
                        log.info("machine 0 stops, and so do we")
                        return
                    case Farewell(cause=cause):
                        raise EngineDied(f"machine 0 failed: {cause}")
                    case PeerGone(cause=cause):
                        raise EngineDied(f"machine 0 is lost: {cause}; the engines here are ended")
                    case _:
                        assert_never(msg)
        except (ActorStopped, TimeoutError) as error:
            raise EngineDied(f"machine 0 is lost: {error}") from None
        finally:
            await self._end()

    def _start(self, msg: Start) -> None:
        try:
            child = self._forks.start(msg.name, self._made_local(msg.order), self._relay(msg.id))
        except ConfigError as error:
            self._tell(Ended(msg.id, Death(msg.name, 0, 1, 0.0, (str(error),))))
            return
        self._children[msg.id] = child
        self._spawn(self._watch(msg.id, child))

    def _relay(self, id: int) -> Callable[[str], None]:
        def forward(line: str) -> None:
            to_stderr(line)
            self._tell(LogLine(id, line))

        return forward

    def _made_local(self, order: bytes) -> bytes:
        """What differs between machines is taken from our own command line."""
        own, ordered = self._config, msgspec.json.decode(order, type=EngineOrder)
        config = replace(
            ordered.config,
            model=replace(ordered.config.model, model=own.model.model),
            device=replace(ordered.config.device, threads=own.device.threads),
            parallel=replace(ordered.config.parallel, cluster_key_file=own.parallel.cluster_key_file),
            server=replace(ordered.config.server, log_level=own.server.log_level, log_format=own.server.log_format),
        )
        return msgspec.json.encode(msgspec.structs.replace(ordered, config=config, born_s=time.monotonic()))

    async def _watch(self, id: int, child: Child | ForkedEngine) -> None:
        if pid := await child.started():
            self._tell(Started(id, pid))
        death = await child.death()
        del self._children[id]
        while not self._tell(Ended(id, death)):  # noqa: ASYNC110  # once in a life
            await asyncio.sleep(AGAIN_S)

    def _signal(self, msg: Signal) -> None:
        child = self._children.get(msg.id)
        if child is None:
            return  # it has ended by itself
        if msg.verdict:
            child.kill(msg.verdict)
        else:
            self._spawn(child.stop(TERM_S))

    def _tell(self, msg: FromNode) -> bool:
        """False if machine 0 does not keep up; who tells of a log line need not care."""
        with suppress(ActorStopped):  # nothing matters any more then
            try:
                self._wire.send(msg)
            except Overloaded:
                return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        for child in self._children.values():
            child.kill("was ended with its machine's agent")
        await self._forks.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._wire.close()
