"""The engine process: `python -m moeserve.cluster.engine_main`, or a fork (fork_server.py); started by nobody else.

It ties itself to its parent, connects, and only then does the slow part of its start. Exit codes: 0 after an ordered
stop, 2 to 5 for a ConfigError (its own code), 1 for a crash, 77 when the parent is gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from typing import Any

import msgspec

from moeserve.actor import guard
from moeserve.actor.actor import Inbox
from moeserve.actor.handshake import Keys, keys_of, read_secret
from moeserve.actor.zmq_wire import ZmqWire, connect
from moeserve.cluster import rundir
from moeserve.cluster.assemble import SeveralRanks, assemble
from moeserve.cluster.logs import set_up_logging
from moeserve.cluster.order import EngineOrder
from moeserve.errors import ActorStopped, ConfigError, EngineDied
from moeserve.messages import Drain, EngineIn, EngineOut, Stopped

log = logging.getLogger("moeserve.cluster.engine_main")

CONNECT_S = 10.0
LINGER_S = 2.0  # for the last words to leave


def main() -> None:
    """Runs an engine until it is told to stop, or fails, and ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the front end decides
    order = msgspec.json.decode(guard.adopt(), type=EngineOrder)
    set_up_logging(order.config.server.log_level, order.config.server.log_format)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_live_and_end(order))
    else:
        uvloop.run(_live_and_end(order))


async def _live_and_end(order: EngineOrder) -> None:
    code = await _serve(order)
    rundir.close_all()  # a start that was cut short has one, until its other ranks are connected
    guard.end_process(code)  # nothing of value is left in here, and a task may wait for a rank which is gone


async def _serve(order: EngineOrder) -> int:
    inbox: Inbox[EngineIn] = Inbox("engine")

    def drain() -> None:
        """Lets running requests finish, as a Drain does."""
        if not inbox.closed:
            inbox.put(Drain(order.config.server.shutdown_timeout), force=True)

    # Without a front end nobody is left to compute for.
    wire: ZmqWire[EngineOut, EngineIn] = connect(
        order.address,
        token=order.token,
        receives=EngineIn,
        inbox=inbox,
        notice=lambda gone: Drain(0.0),
        keys=_keys(order),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drain)
    try:
        await wire.connected(CONNECT_S)
        return await _live(order, inbox, wire.send)
    except ActorStopped as exc:  # refused by the front end; it knows why
        log.error("%s", exc)
        return 1
    except ConfigError as exc:
        wire.send(Stopped(str(exc)))
        return exc.exit_code
    except Exception as exc:
        log.exception("the engine failed")
        wire.send(Stopped(f"{type(exc).__name__}: {exc}"))
        return 1
    finally:
        wire.close(LINGER_S)


def _keys(order: EngineOrder) -> Keys | None:
    """Returns the cluster's keys if the front end is on another machine."""
    key_file = order.config.parallel.cluster_key_file
    return keys_of(read_secret(key_file)) if key_file and order.address.startswith("tcp://") else None


async def _live(order: EngineOrder, inbox: Inbox[EngineIn], emit: Callable[[EngineOut], object]) -> int:
    loop = asyncio.get_running_loop()
    building = loop.create_task(assemble(order.config, order.builder, order.role, inbox, emit, order.born_s))
    stopping = loop.create_task(_order_to_stop(inbox))
    await asyncio.wait({building, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not building.done():
        building.cancel()
        emit(Stopped(""))
        return 0
    stopping.cancel()
    await asyncio.wait({stopping})
    core, ready = building.result()
    gc.collect()
    gc.freeze()  # what is there now stays for life: no collection needs to look at it again
    emit(ready)
    running = loop.create_task(core.run())  # its last message is Stopped, also when it fails
    dying: asyncio.Future[Exception] = loop.create_future()
    if isinstance(core.runner, SeveralRanks):
        dying = loop.create_task(core.runner.died())
    either: tuple[asyncio.Future[Any], ...] = running, dying
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        running.add_done_callback(lambda task: task.cancelled() or task.exception())  # the cause is known
        log.error("%s", dying.result())
        emit(Stopped(str(dying.result())))
        return 1
    dying.cancel()
    if (error := running.exception()) is not None:
        # Where the loss of another rank was noticed says nothing about its cause.
        log.error("the engine failed: %s", error, exc_info=None if isinstance(error, EngineDied) else error)
        return 1
    core.runner.close()
    return 0


async def _order_to_stop(inbox: Inbox[EngineIn]) -> None:
    """Returns at the first Drain. Other messages wait for the engine that is being built."""
    early: list[EngineIn] = []
    try:
        while not any(isinstance(msg, Drain) for msg in early):
            early += await inbox.drain(wait=True)
    finally:
        for msg in early:
            inbox.put(msg, force=True)


if __name__ == "__main__":
    main()
