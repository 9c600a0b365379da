"""`moeserve serve --node-rank i`: the agent of a machine that is not machine 0. It answers no HTTP.

The agent joins at the rendezvous, starts the engines that machine 0 orders, and reports their ends. Its engines end
with it, and it ends with machine 0. Exit codes: 0 after a stop of machine 0 or of the agent, 1 when machine 0 is lost,
2 when the machine cannot join.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import msgspec

from moeserve.actor.actor import Actor, Inbox
from moeserve.actor.handshake import Keys, keys_of, read_secret, token_of
from moeserve.actor.process import Child, Death, to_stderr
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, connect
from moeserve.cluster.assemble import in_thread
from moeserve.cluster.check_parallel import check_machines, rendezvous_of
from moeserve.cluster.forks import LocalHost
from moeserve.cluster.host import Ended, Farewell, FromNode, LogLine, Signal, Start, Started, ToNode
from moeserve.cluster.launch.protocol import tell
from moeserve.cluster.logs import set_up_logging
from moeserve.cluster.order import EngineOrder
from moeserve.cluster.rendezvous import TOKEN, Admitted, Attendance, TurnedAway, attendance, bracketed, resolve
from moeserve.cluster.rundir import RunDir
from moeserve.config import Config
from moeserve.errors import ActorStopped, ConfigError, EngineDied, Overloaded

log = logging.getLogger(__name__)

JOIN_S = 4.0  # from the process's own start: less than 5 s until we say what is wrong
LAUNCHED_JOIN_S = 600.0  # a launcher starts machine 0 too, at its own time: with an image to pull, say
ATTEMPT_S = 1.0  # at least, however slow the start was
AGAIN_S = 0.1


def serve_node(config: Config, join_s: float = JOIN_S) -> int:
    """Runs an agent until machine 0 stops or a signal comes. join_s: from the process's start until it must have
    joined. Raises ConfigError, or EngineDied if machine 0 is lost."""
    set_up_logging(config.server.log_level, config.server.log_format)
    check_machines(config.parallel)
    return asyncio.run(_until_signal(config, join_s))


async def _until_signal(config: Config, join_s: float) -> int:
    task = asyncio.ensure_future(_live(config, join_s))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("told to stop")
    return 0


async def _live(config: Config, join_s: float) -> None:
    secret = read_secret(str(config.parallel.cluster_key_file))
    run_dir = RunDir()
    try:
        facts = await in_thread("model", lambda: attendance(config, run_dir.path))
        deadline_s = asyncio.get_running_loop().time() + max(ATTEMPT_S, join_s - _age_s())
        admitted = await join(config, secret, facts, deadline_s)
        await NodeAgent(config, LocalHost(run_dir.path), admitted, keys_of(secret)).run()
    finally:
        run_dir.close()


async def join(config: Config, secret: bytes, facts: Attendance, deadline_s: float) -> Admitted:
    """Tries to join until the deadline, on the loop's clock. Raises ConfigError with machine 0's reason or a cause."""
    host, port = rendezvous_of(config.parallel)
    cause, asked = f"the name {host!r} was not resolved in time", ""
    clock = asyncio.get_running_loop().time
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline_s):
            while True:
                before = cause
                try:
                    # Again each time: a pod's name comes with the pod, and another pod has another address.
                    address = f"tcp://{bracketed(await in_thread('resolve', lambda: resolve(host)))}:{port}"
                except ConfigError as error:
                    cause = str(error)
                else:
                    if address != asked:
                        asked = address
                        cause = f"no answer from {address}: check --rendezvous, and that firewalls let its port through"
                    answer = await _ask(address, secret, facts)
                    if isinstance(answer, Admitted):
                        return answer
                    if isinstance(answer, TurnedAway):
                        raise ConfigError(f"machine 0 turned this machine away: {answer.cause}")
                    cause = answer.cause
                    if cause.startswith("nobody listens"):
                        cause += ": start machine 0 first, or check --rendezvous"
                if cause != before and deadline_s - clock() > JOIN_S:
                    log.info("waiting to join: %s", cause)
                await asyncio.sleep(AGAIN_S)
    raise ConfigError(f"machine {facts.node_rank} could not join: {cause}")


def _age_s() -> float:
    """Returns the age of this process, Python's own start included; 0 where there is no /proc."""
    try:
        begun = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # in ticks since the boot
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun / os.sysconf("SC_CLK_TCK")


async def _ask(address: str, secret: bytes, facts: Attendance) -> Admitted | TurnedAway | PeerGone:
    """Asks once. PeerGone: nobody answered, with the cause."""
    inbox: Inbox[Admitted | TurnedAway | PeerGone] = Inbox("rendezvous")
    token, keys = token_of(secret, TOKEN), keys_of(secret)
    wire = connect(address, token=token, receives=Admitted | TurnedAway, inbox=inbox, keys=keys)
    try:
        wire.send(facts)  # after the hello
        return (await inbox.drain(wait=True))[0]
    finally:
        wire.close()


class NodeAgent(Actor[ToNode | PeerGone]):
    """Starts, ends and watches engines by machine 0's orders.

    `run` returns when machine 0 stops and raises EngineDied when machine 0 fails or is lost.
    """

    def __init__(self, config: Config, host: LocalHost, admitted: Admitted, keys: Keys) -> None:
        super().__init__("machine 0")
        self._config = config
        self._host = host
        self._children: dict[int, Child] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}  # one for each child, from the order to its end
        self._wire: ZmqWire[FromNode, ToNode | PeerGone] = connect(
            admitted.address, token=admitted.token, receives=ToNode, inbox=self.inbox, keys=keys
        )

    async def on_start(self) -> None:
        """Waits for the connection. Raises EngineDied."""
        try:
            await self._wire.connected(JOIN_S)
        except (ActorStopped, TimeoutError) as error:
            self._wire.close()
            raise EngineDied(f"machine 0 is lost: {error}") from None
        self._host.keep(self._config)
        log.info("this is machine %d; machine 0 is in charge", self._config.parallel.node_rank)
        tell("joined")

    def handle(self, msg: ToNode | PeerGone) -> None:
        """Obeys one order."""
        match msg:
            case Start():
                self._lives[msg.id] = asyncio.get_running_loop().create_task(self._live(msg), name=msg.name)
            case Signal():
                self._signal(msg)
            case Farewell(cause=""):
                log.info("machine 0 stops or drains this machine")
                self.stop()
            case Farewell(cause=cause):
                raise EngineDied(f"machine 0 failed: {cause}")
            case PeerGone(cause=cause):
                raise EngineDied(f"machine 0 is lost: {cause}; the engines here are ended")
            case _:
                assert_never(msg)

    async def on_stop(self) -> None:
        """Ends all engines."""
        for id in list(self._lives):
            self._signal(Signal(id, "was ended with its machine's agent"))
        await self._host.close()
        await asyncio.gather(*self._lives.values(), return_exceptions=True)
        self._wire.close()

    async def _live(self, msg: Start) -> None:
        """One engine, from its start to the report of its end."""
        try:
            child = await self._host.start(msg.name, self._made_local(msg.order), self._relay(msg.id))
        except ConfigError as error:
            death = Death(msg.name, 0, 1, 0.0, (str(error),))
        else:
            self._children[msg.id] = child
            self._tell(Started(msg.id, child.pid))
            death = await child.death()
            del self._children[msg.id]
        del self._lives[msg.id]
        while not self._tell(Ended(msg.id, death)):  # noqa: ASYNC110  # once in a life
            await asyncio.sleep(AGAIN_S)

    def _relay(self, id: int) -> Callable[[str], None]:
        def forward(line: str) -> None:
            """Prints a child's line here and sends it to the front end."""
            to_stderr(line)
            self._tell(LogLine(id, line))

        return forward

    def _made_local(self, order: bytes) -> bytes:
        """Replaces what differs between machines by the settings of our own command line."""
        own, ordered = self._config, msgspec.json.decode(order, type=EngineOrder)
        config = replace(
            ordered.config,
            model=replace(ordered.config.model, model=own.model.model),
            device=replace(ordered.config.device, threads=own.device.threads),
            parallel=replace(ordered.config.parallel, cluster_key_file=own.parallel.cluster_key_file),
            server=replace(ordered.config.server, log_level=own.server.log_level, log_format=own.server.log_format),
        )
        role = msgspec.structs.replace(ordered.role, folder=self._host.folder)
        return msgspec.json.encode(msgspec.structs.replace(ordered, config=config, role=role, born_s=time.monotonic()))

    def _signal(self, msg: Signal) -> None:
        if (child := self._children.get(msg.id)) is None:
            if (life := self._lives.pop(msg.id, None)) is not None:  # its start is under way
                life.cancel()
                why = msg.reason or "was stopped before it began"
                self._tell(Ended(msg.id, Death(life.get_name(), 0, -signal.SIGKILL, 0.0, (), why)))
        elif msg.reason:
            child.kill(msg.reason)
        else:
            child.terminate()

    def _tell(self, msg: FromNode) -> bool:
        """Returns False if machine 0 does not keep up; a log line may be lost then."""
        try:
            self._wire.send(msg)
        except Overloaded:
            return False
        return True
