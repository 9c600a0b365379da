"""The engine process: `python -m moeserve.cluster.engine_main`, or a fork of fork_server.py.

The process starts in this order:

1. Arrange to die with its parent.
2. Read its `EngineOrder` from stdin. If it was started early (ahead.py), it imports libraries
   meanwhile.
3. Connect to the front end.
4. Build the engine, which is slow, and serve.

With --standby the process outlives its front end: it drops all requests and waits for the order of
the next one.

Exit codes: 0 after an ordered stop, 1 for a crash, 2 to 5 for a ConfigError (its own code), 77 when
the parent is gone.
"""

import asyncio
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import msgspec

from moeserve.actor import guard
from moeserve.actor.actor import Inbox
from moeserve.actor.handshake import Keys, keys_of, read_secret
from moeserve.actor.tasks import spawn
from moeserve.actor.zmq_wire import ZmqWire, connect, flush_closed
from moeserve.cluster.assemble import SeveralRanks, assemble
from moeserve.cluster.logs import set_up_logging
from moeserve.cluster.order import EngineOrder
from moeserve.errors import ActorStopped, ConfigError, EngineDied
from moeserve.messages import AbortAll, Drain, EngineIn, EngineOut, Ping, Pong, Ready, Stopped

log = logging.getLogger("moeserve.cluster.engine_main")

CONNECT_TIMEOUT_S = 10.0  # for the wire to a front end
LINGER_TIMEOUT_S = 2.0  # for the last messages to be sent
LAST_PING = -1  # number of the ping that is sent after the last message of a lost front end


def main() -> None:
    """Run an engine until it stops or fails, and end the process."""
    # Ctrl-C reaches all processes of the terminal, but the front end decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    next_orders: SimpleQueue[bytes] = SimpleQueue()  # of further front ends (--standby)
    if "ahead" in sys.argv[1:]:
        threading.Thread(target=import_ahead, name="imports", daemon=True).start()
    order = msgspec.json.decode(guard.adopt(next_orders.put), type=EngineOrder)
    set_up_logging(order.config.server.log_level, order.config.server.log_format)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve_and_end_process(order, next_orders))
    else:
        uvloop.run(_serve_and_end_process(order, next_orders))


def import_ahead(*, any_model: bool = False) -> None:
    """Import the modules that every rank needs. No import may leave a thread behind or use a
    device.

    any_model: also import the parts that an engine chooses by its model on a CPU. Registries would
    import them at each start.
    """
    gc.disable()  # imports make many objects, few of which are garbage
    with suppress(ImportError):
        import uvloop  # noqa: F401
    import moeserve.cluster.build
    import moeserve.cluster.tp_worker
    import moeserve.comm.dp_coordinator
    import moeserve.engine.group_core
    import moeserve.engine.scheduler
    import moeserve.moe.all2all.shm
    import moeserve.runner.cpu
    import moeserve.runner.factory
    import moeserve.runner.group  # noqa: F401

    if any_model:
        _import_model_parts()
    gc.freeze()  # this includes about 1 MB of garbage
    gc.enable()


def _import_model_parts() -> None:
    import moeserve.runner.sampling.native  # noqa: F401
    from moeserve.blocks.kinds import MIXERS
    from moeserve.models.registry import FAMILIES
    from moeserve.moe.experts.registry import EXPERT_KERNELS

    FAMILIES.import_parts(FAMILIES.built_in)
    MIXERS.import_parts(MIXERS.built_in)
    EXPERT_KERNELS.import_parts(["native", "grouped_mm"])  # those for GPUs are slow to import


async def _serve_and_end_process(order: EngineOrder, next_orders: SimpleQueue[bytes]) -> None:
    # End the process without cleaning up, because a task may wait for a rank that is gone.
    guard.end_process(await _serve(order, next_orders))


async def _serve(order: EngineOrder, next_orders: SimpleQueue[bytes]) -> int:
    """Serve until the engine stops or fails, and return the exit code."""
    inbox: Inbox[EngineIn] = Inbox("engine")

    def drain() -> None:
        if not inbox.closed:
            inbox.put(Drain(order.config.server.shutdown_timeout), force=True)

    link = FrontEndLink(order, inbox)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drain)
    send: Callable[[EngineOut], object] = (
        link.wire.send
    )  # without --standby, the wire never changes
    if order.config.parallel.standby:
        send = link.send
        link.start_following(next_orders)
    try:
        await link.wire.connected(CONNECT_TIMEOUT_S)
        return await _run_engine(order, inbox, send)
    except ActorStopped as exc:  # the front end has rejected the process, and logs why
        log.error("%s", exc)
        return 1
    except ConfigError as exc:
        link.send(Stopped(str(exc)))
        return exc.exit_code
    except Exception as exc:
        log.exception("the engine failed")
        link.send(Stopped(f"{type(exc).__name__}: {exc}"))
        return 1
    finally:
        link.wire.close(LINGER_TIMEOUT_S)
        await flush_closed(LINGER_TIMEOUT_S)


class FrontEndLink:
    """The wire to the front end. With --standby, it moves on to the next front end."""

    def __init__(self, order: EngineOrder, inbox: Inbox[EngineIn]) -> None:
        self._following: asyncio.Task[None] | None = None
        self._inbox = inbox
        self._ready: Ready | None = None  # the engine's facts, once it is built
        # Set when the engine has dropped the requests of a lost front end.
        self._requests_dropped = asyncio.Event()
        self.wire = self._connect(order)

    def _connect(self, order: EngineOrder) -> ZmqWire[EngineOut, EngineIn]:
        # When the front end is lost, end its requests; without --standby, end the engine too.
        notice = AbortAll() if order.config.parallel.standby else Drain(0.0)
        return connect(
            order.address,
            token=order.token,
            receives=EngineIn,
            inbox=self._inbox,
            notice=lambda gone: notice,
            keys=_keys(order),
        )

    def send(self, msg: EngineOut) -> None:
        """Send the front end a message, or drop it if there is no front end.

        The answer to LAST_PING is not sent: it shows that the engine has handled all messages of
        the lost front end. A Ready is also kept for the next front end.
        """
        match msg:
            case Pong(seq=seq) if seq == LAST_PING:
                self._requests_dropped.set()
                return
            case Ready():
                self._ready = msg
        self.wire.send(msg)

    def start_following(self, next_orders: SimpleQueue[bytes]) -> None:
        """Serve the front end of each further order, in a task.

        An error in the task ends the process, because the engine would never answer the next front
        end, which then starts another process.
        """
        self._following = spawn(
            self.follow(next_orders), name="next front end", on_error=_on_following_failed
        )

    async def follow(self, next_orders: SimpleQueue[bytes]) -> None:
        """Serve the front end of each further order in place of the previous one; never return."""
        orders: asyncio.Queue[bytes] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def pass_on_orders() -> None:
            while True:
                loop.call_soon_threadsafe(orders.put_nowait, next_orders.get())

        threading.Thread(target=pass_on_orders, name="orders", daemon=True).start()
        while True:
            order = msgspec.json.decode(await orders.get(), type=EngineOrder)
            self.wire.close()
            if self._ready is not None:  # otherwise there are no requests yet
                self._requests_dropped.clear()
                # The next front end uses the same request ids for other requests, so wait until the
                # engine has dropped the old ones.
                self._inbox.put(AbortAll(), force=True)
                self._inbox.put(Ping(LAST_PING), force=True)
                await self._requests_dropped.wait()
            self.wire = self._connect(order)
            with suppress(ActorStopped, TimeoutError):  # this front end is gone, too
                await self.wire.connected(CONNECT_TIMEOUT_S)
                if self._ready is not None:
                    self.wire.send(self._ready)


def _on_following_failed(_name: str, error: Exception) -> None:
    log.error("the engine cannot follow its front ends", exc_info=error)
    guard.end_process(1)


def _keys(order: EngineOrder) -> Keys | None:
    """Return the cluster's keys if the front end is on another machine."""
    key_file = order.config.parallel.cluster_key_file
    is_remote = order.address.startswith("tcp://")
    return keys_of(read_secret(key_file)) if key_file and is_remote else None


async def _run_engine(
    order: EngineOrder, inbox: Inbox[EngineIn], emit: Callable[[EngineOut], object]
) -> int:
    """Build the engine and run it to its end. Return the exit code."""
    loop = asyncio.get_running_loop()
    building = loop.create_task(
        assemble(order.config, order.builder, order.role, inbox, emit, order.born_s)
    )
    drain_ordered = loop.create_task(_wait_for_drain(inbox))
    await asyncio.wait({building, drain_ordered}, return_when=asyncio.FIRST_COMPLETED)
    if not building.done():
        building.cancel()
        emit(Stopped(""))
        return 0
    drain_ordered.cancel()
    await asyncio.wait({drain_ordered})  # so that it puts the messages back into the inbox
    core, ready = building.result()
    gc.collect()
    gc.freeze()  # all objects that exist now are permanent, so no collection needs to scan them
    emit(ready)
    running = loop.create_task(core.run())  # emits Stopped at its end, even if it fails
    rank_death: asyncio.Future[Exception] = loop.create_future()  # never, with a single rank
    if isinstance(core.runner, SeveralRanks):
        rank_death = loop.create_task(core.runner.died())
    both_ends: tuple[asyncio.Future[Any], ...] = (running, rank_death)
    await asyncio.wait(both_ends, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        # Retrieve the exception, so that asyncio does not log it: the cause is known already.
        running.add_done_callback(lambda task: task.cancelled() or task.exception())
        log.error("%s", rank_death.result())
        emit(Stopped(str(rank_death.result())))
        return 1
    rank_death.cancel()
    if (error := running.exception()) is not None:
        # The traceback of an EngineDied shows only where the loss of a rank was noticed.
        log.error(
            "the engine failed: %s",
            error,
            exc_info=None if isinstance(error, EngineDied) else error,
        )
        return 1
    core.runner.close()
    return 0


async def _wait_for_drain(inbox: Inbox[EngineIn]) -> None:
    """Return at the first Drain. Keep all messages for the engine that is being built."""
    messages: list[EngineIn] = []
    try:
        while not any(isinstance(msg, Drain) for msg in messages):
            messages += await inbox.drain(wait=True)
    finally:
        for msg in messages:
            inbox.put(msg, force=True)


if __name__ == "__main__":
    main()
