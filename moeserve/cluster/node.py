"""The agent of a machine other than machine 0 (`moeserve serve --node-rank i`). It serves no HTTP.

The front end runs on machine 0. The agent joins at the rendezvous, starts engines when machine 0
orders it, and reports their ends.
Engines end with the agent, and the agent ends with machine 0. With --standby it keeps the engines
for KEEP_S, so that the next machine 0 can take them over.

Exit codes: 0 if machine 0 or the agent was stopped, 1 if machine 0 is lost, 2 if the machine cannot
join.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import assert_never

import msgspec

from moeserve.actor.actor import Actor, Inbox
from moeserve.actor.handshake import Keys, keys_of, read_secret, token_of
from moeserve.actor.process import Child, Death, to_stderr
from moeserve.actor.tasks import cancel, in_thread, log_error, spawn
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, connect
from moeserve.cluster.check_parallel import check_machines, rendezvous_of
from moeserve.cluster.forks import LocalHost
from moeserve.cluster.host import (
    Ended,
    FleetSnapshot,
    FromNode,
    Heartbeat,
    LogLine,
    Shutdown,
    Signal,
    Start,
    Started,
    ToNode,
)
from moeserve.cluster.launch.protocol import report_state
from moeserve.cluster.logs import set_up_logging
from moeserve.cluster.order import EngineOrder
from moeserve.cluster.rendezvous import (
    TOKEN,
    Admitted,
    Registration,
    Rejected,
    bracketed,
    make_registration,
    resolve,
)
from moeserve.cluster.rundir import RunDir
from moeserve.config import Config
from moeserve.errors import ActorStopped, ConfigError, EngineDied, Overloaded
from moeserve.hub.progress import TerminalProgress
from moeserve.loader.model_dir import hub_name_of
from moeserve.models.fetch import local_config

log = logging.getLogger(__name__)

JOIN_S = 4.0  # timeout from the start of the process, so that an error is printed within 5 s
LAUNCHED_JOIN_S = 600.0  # timeout under a launcher, whose machine 0 may still pull an image
# Timeout if the model is on a hub: machine 0 may still download it. The log says what it waits for.
DOWNLOAD_JOIN_S = 86_400.0
MIN_JOIN_S = 1.0  # shortest timeout for joining, if the start of the process was slow
RETRY_INTERVAL_S = 0.1  # between attempts to join, and between attempts to report an end
KEEP_S = 30.0  # time for another front end to take over the engines of a lost one


class FrontEndLost(EngineDied):
    """Raised if the front end is gone without a Shutdown."""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A running engine of this machine and the order that it was started with."""

    child: Child
    order: EngineOrder


Orphans = dict[str, RunningEngine]  # engines that wait for another front end, by name
OpenWire = Callable[[Inbox[ToNode | PeerGone]], ZmqWire[FromNode, ToNode | PeerGone]]


def serve_node(config: Config, join_s: float = JOIN_S) -> int:
    """Run an agent until machine 0 stops or this process gets SIGTERM or SIGINT.

    Raises ConfigError if the machine cannot join, EngineDied if machine 0 is lost.

    join_s: timeout for joining, from the start of the process.
    """
    set_up_logging(config.server.log_level, config.server.log_format)
    check_machines(config.parallel)
    return asyncio.run(_until_signal(config, join_s))


async def _until_signal(config: Config, join_s: float) -> int:
    task = asyncio.ensure_future(_join_and_serve(config, join_s))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("stopped by a signal")
    return 0


async def _join_and_serve(config: Config, join_s: float) -> None:
    secret = read_secret(str(config.parallel.cluster_key_file))
    if (name := hub_name_of(config.model.model)) is not None:
        report_state(f"getting {name}")
        join_s = max(join_s, DOWNLOAD_JOIN_S)
        with TerminalProgress() as progress:
            config = await local_config(config, progress)
    clock = asyncio.get_running_loop().time
    run_dir = RunDir()
    host = LocalHost(run_dir.path)
    loss_cause = ""  # why the last front end was lost
    orphans: Orphans | None = {} if config.parallel.standby else None
    try:
        # In a thread, because it reads the checkpoint.
        own_registration = await in_thread("model", lambda: make_registration(config, run_dir.path))
        deadline_s = clock() + max(MIN_JOIN_S, join_s - _process_age_s())
        while True:
            try:
                admitted = await join(config, secret, own_registration, deadline_s)
                open_wire = wire_opener(admitted, keys_of(secret))
                await NodeAgent(config, host, open_wire, orphans).run()
                return
            except FrontEndLost as error:
                if orphans is None:
                    raise
                loss_cause = str(error)
                deadline_s = clock() + KEEP_S
                log.warning(
                    "%s; %d engines wait for another one, %g s", loss_cause, len(orphans), KEEP_S
                )
            except ConfigError as error:  # this machine could not join
                if loss_cause:
                    raise EngineDied(f"{loss_cause}; {error}") from None
                raise
    finally:
        await end_all(orphans)
        await host.close()
        run_dir.close()


def wire_opener(admitted: Admitted, keys: Keys) -> OpenWire:
    """Return a function that opens the wire to machine 0."""
    return lambda inbox: connect(
        admitted.address, token=admitted.token, receives=ToNode, inbox=inbox, keys=keys
    )


async def end_all(orphans: Orphans | None) -> None:
    """End the engines that wait for a front end, and empty `orphans`."""
    engines = [orphans.pop(name) for name in list(orphans)] if orphans else []
    for engine in engines:
        engine.child.kill("was not needed any more")
    await asyncio.gather(*(engine.child.death() for engine in engines))


async def join(
    config: Config, secret: bytes, own_registration: Registration, deadline_s: float
) -> Admitted:
    """Register this machine at machine 0, and retry until the deadline (on the loop's clock).

    Raises ConfigError if machine 0 rejects this machine or does not answer.
    """
    host, port = rendezvous_of(config.parallel)
    cause = f"the name {host!r} was not resolved in time"
    last_address = ""
    clock = asyncio.get_running_loop().time
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline_s):
            while True:
                last_cause = cause
                try:
                    # Resolve the name each time: a pod's name appears with the pod, and a new pod
                    # has another address.
                    ip_address = await in_thread("resolve", lambda: resolve(host))
                    address = f"tcp://{bracketed(ip_address)}:{port}"
                except ConfigError as error:
                    cause = str(error)
                else:
                    if address != last_address:
                        last_address = address
                        cause = (
                            f"no answer from {address}: check --rendezvous, and that firewalls"
                            " allow its port"
                        )
                    answer = await _register(address, secret, own_registration)
                    if isinstance(answer, Admitted):
                        return answer
                    if isinstance(answer, Rejected):
                        raise ConfigError(f"machine 0 rejected this machine: {answer.cause}")
                    cause = answer.cause
                    if cause.startswith("nobody listens"):  # an error of zmq_wire.connect
                        cause += ": start machine 0 first, or check --rendezvous"
                # A short wait needs no log: the error at its end has the cause.
                if cause != last_cause and deadline_s - clock() > JOIN_S:
                    log.info("waiting to join: %s", cause)
                await asyncio.sleep(RETRY_INTERVAL_S)
    raise ConfigError(f"machine {own_registration.node_rank} could not join: {cause}")


def _process_age_s() -> float:
    """Return the age of this process, including Python's startup; 0 if there is no /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    began_at_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_at_s


async def _register(
    address: str, secret: bytes, own_registration: Registration
) -> Admitted | Rejected | PeerGone:
    """Register once. Return the answer, or PeerGone with the cause if there is none."""
    inbox: Inbox[Admitted | Rejected | PeerGone] = Inbox("rendezvous")
    token = token_of(secret, TOKEN)
    keys = keys_of(secret)
    wire = connect(address, token=token, receives=Admitted | Rejected, inbox=inbox, keys=keys)
    try:
        wire.send(own_registration)  # the wire sends its hello first
        return (await inbox.drain(wait=True))[0]
    finally:
        wire.close()


class NodeAgent(Actor[ToNode | PeerGone]):
    """Starts, ends and watches engines, as machine 0 orders.

    `run` returns when machine 0 stops. It raises EngineDied if machine 0 fails, FrontEndLost if
    machine 0 is lost. The engines end with the agent.

    With --standby (`orphans` is not None), engines outlive an agent that has lost machine 0: they
    are added to `orphans`, where the next agent finds them. With --standby, machine 0 runs an agent
    too (`node_rank` 0); it gets its orders from the front end.
    """

    def __init__(
        self,
        config: Config,
        host: LocalHost,
        open_wire: OpenWire,
        orphans: Orphans | None = None,
        connect_s: float = JOIN_S,
    ) -> None:
        super().__init__("machine 0")  # the inbox's name in errors: its messages come from there
        self.num_heartbeats = 0  # that machine 0 has sent
        # The last one received; the next front end continues from it.
        self.snapshot: FleetSnapshot | None = None
        self._config = config
        self._host = host
        self._orphans = orphans
        self._connect_s = connect_s
        self._is_front_end_lost = False
        # By the number of the process (`Start.id`):
        self._engines: dict[int, RunningEngine] = {}
        self._engine_tasks: dict[int, asyncio.Task[None]] = {}  # from the order to the end
        self._ending_orphans: asyncio.Task[None] | None = None
        self._wire = open_wire(self.inbox)

    async def on_start(self) -> None:
        """Wait for the connection to machine 0. Raises EngineDied."""
        try:
            await self._wire.connected(self._connect_s)
        except BaseException as error:
            self._wire.close()
            if not isinstance(error, ActorStopped | TimeoutError):
                raise
            raise FrontEndLost(f"machine 0 is lost: {error}") from None
        self._host.keep_fork_server(self._config)
        if self._config.parallel.node_rank:
            log.info("this is machine %d; machine 0 is in charge", self._config.parallel.node_rank)
            report_state("joined")
        if self._orphans:
            self._ending_orphans = spawn(
                self._end_orphans_later(), name="sweep of orphaned engines", on_error=log_error
            )

    @property
    def connected(self) -> bool:
        """Whether machine 0 was connected."""
        return self._wire.greeted

    def continue_from(self, snapshot: FleetSnapshot | None) -> None:
        """Keep the snapshot of the previous front end until the next one arrives."""
        self.snapshot = snapshot

    def close(self) -> None:
        """Close the wire of an agent that was not run."""
        self._wire.close()

    async def _end_orphans_later(self) -> None:
        """End the engines that this front end has not taken over after KEEP_S."""
        await asyncio.sleep(KEEP_S)
        await end_all(self._orphans)

    def handle(self, msg: ToNode | PeerGone) -> None:
        match msg:
            case Start():
                self._engine_tasks[msg.id] = spawn(
                    self._run_engine(msg),
                    name=msg.name,
                    on_error=partial(self._on_task_failed, msg.id),
                )
            case Signal():
                self._signal(msg)
            case Heartbeat():
                self.num_heartbeats += 1
            case FleetSnapshot():
                self.snapshot = msg
            case Shutdown(cause=""):
                log.info("machine 0 stops or drains this machine")
                self.stop()
            case Shutdown(cause=cause):
                raise EngineDied(f"machine 0 failed: {cause}")
            case PeerGone(cause=cause):
                self._is_front_end_lost = True
                fate = "are ended" if self._orphans is None else "are kept"
                raise FrontEndLost(f"machine 0 is lost: {cause}; the engines here {fate}")
            case _:
                assert_never(msg)

    async def on_stop(self) -> None:
        """End all engines, or keep the running ones as orphans."""
        await cancel(self._ending_orphans)
        if self._is_front_end_lost and self._orphans is not None:
            for task in self._engine_tasks.values():
                task.cancel()
            self._orphans |= {engine.child.name: engine for engine in self._engines.values()}
        else:
            for id in list(self._engine_tasks):
                self._signal(Signal(id, reason="was ended with its machine's agent"))
            await self._host.close()
        await asyncio.gather(*self._engine_tasks.values(), return_exceptions=True)
        self._wire.close()

    async def _run_engine(self, msg: Start) -> None:
        """Run one engine, from its start to the report of its end."""
        order = self._adapt_order(msg.order)
        try:
            child = await self._take_orphan_or_start(msg, order)
        except ConfigError as error:
            death = Death(name=msg.name, pid=0, exit_code=1, lived_s=0.0, log_tail=(str(error),))
        else:
            self._engines[msg.id] = RunningEngine(child, order)
            self._send(Started(msg.id, child.pid))
            death = await child.death()
            del self._engines[msg.id]
        del self._engine_tasks[msg.id]
        # The report must not be lost, so send it again while machine 0 does not keep up.
        while not self._send(Ended(msg.id, death)):  # noqa: ASYNC110
            await asyncio.sleep(RETRY_INTERVAL_S)

    def _on_task_failed(self, id: int, name: str, error: Exception) -> None:
        """End an engine whose task has failed; machine 0 will start another one."""
        log_error(name, error)
        self._engine_tasks.pop(id, None)
        engine = self._engines.pop(id, None)
        if engine is not None:
            engine.child.kill("was not watched any more")
        reason = f"the agent of its machine failed: {error!r}"
        self._send(Ended(id, _killed(name, reason)))

    async def _take_orphan_or_start(self, msg: Start, order: EngineOrder) -> Child:
        """Give the order to the orphan of that name, or start a new engine if there is none or its
        settings differ.
        """
        encoded = msgspec.json.encode(order)
        forward_line = self._line_forwarder(msg.id)
        orphan = None if self._orphans is None else self._orphans.pop(msg.name, None)
        if orphan is not None and orphan.child.alive:
            if can_take_over(orphan.order, order):
                orphan.child.hand_over(encoded, forward_line)
                return orphan.child
            orphan.child.kill("has other settings than the new front end")
            await orphan.child.death()
        return await self._host.start(msg.name, encoded, forward_line)

    def _line_forwarder(self, id: int) -> Callable[[str], None]:
        """Return a function that sends log lines of an engine to machine 0."""

        def forward_line(line: str) -> None:
            to_stderr(line)
            self._send(LogLine(id, line))

        return forward_line

    def _adapt_order(self, order: bytes) -> EngineOrder:
        """Replace the settings that may differ between machines by those of this machine."""
        own = self._config
        ordered = msgspec.json.decode(order, type=EngineOrder)
        config = replace(
            ordered.config,
            model=replace(ordered.config.model, model=own.model.model),
            device=replace(ordered.config.device, threads=own.device.threads),
            parallel=replace(
                ordered.config.parallel, cluster_key_file=own.parallel.cluster_key_file
            ),
            server=replace(
                ordered.config.server,
                log_level=own.server.log_level,
                log_format=own.server.log_format,
            ),
        )
        role = msgspec.structs.replace(ordered.role, folder=self._host.folder)
        return msgspec.structs.replace(ordered, config=config, role=role, born_s=time.monotonic())

    def _signal(self, msg: Signal) -> None:
        """End an engine by a signal, or cancel its start. An engine that has ended is ignored."""
        if (engine := self._engines.get(msg.id)) is not None:
            if msg.reason:
                engine.child.kill(msg.reason)
            else:
                engine.child.terminate()
        elif (starting := self._engine_tasks.pop(msg.id, None)) is not None:
            starting.cancel()
            reason = msg.reason or "was stopped before it began"
            self._send(Ended(msg.id, _killed(starting.get_name(), reason)))

    def _send(self, msg: FromNode) -> bool:
        """Send a message. Return False if machine 0 does not keep up, so that it was dropped."""
        try:
            self._wire.send(msg)
        except Overloaded:
            return False
        return True


def _killed(name: str, reason: str) -> Death:
    """Return the death, by SIGKILL, of an engine whose process id and log are not known."""
    return Death(
        name=name, pid=0, exit_code=-signal.SIGKILL, lived_s=0.0, log_tail=(), reason=reason
    )


def can_take_over(started: EngineOrder, new: EngineOrder) -> bool:
    """Return whether an engine that was started with one order can serve under a new one.

    Its connection, its rank and the placement may differ, because the new order or a Join sets
    them.
    """
    world = new.role.world
    if (started.role.world.tp_size, started.role.world.ep) != (world.tp_size, world.ep):
        return False
    role = msgspec.structs.replace(started.role, placement=new.role.placement, world=world)
    adapted = msgspec.structs.replace(
        started, address=new.address, token=new.token, born_s=new.born_s, role=role
    )
    return adapted == new
