"""The engine process: `python -m moeserve.launch.engine_process`, started by `ChildEngine` and by nobody else.

First the ties to the parent, then the wire and a first word, and only then whatever takes long. Exit codes: 0
after an ordered stop, 2 to 5 for a ConfigError (its own), 1 for a crash, 77 when the parent is gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from contextlib import suppress

import msgspec

from moeserve.actor import guard
from moeserve.actor.inbox import Inbox
from moeserve.actor.wire import PeerGone
from moeserve.actor.zmq_wire import ZmqWire, connect
from moeserve.errors import ActorStopped, ConfigError
from moeserve.launch.assemble import assemble
from moeserve.launch.logs import set_up_logging
from moeserve.launch.order import EngineOrder
from moeserve.messages import Drain, EngineIn, EngineOut, Stopped

log = logging.getLogger("moeserve.launch.engine_process")

CONNECT_S = 10.0
LINGER_S = 2.0  # for the last words to leave


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the front end decides
    order = msgspec.json.decode(guard.adopt(), type=EngineOrder)
    set_up_logging(order.config.server.log_level, order.config.server.log_format)
    code = _run_loop(order)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # Nothing of value is left in here, and taking down a large process in order takes seconds or hangs.
    os._exit(code)


def _run_loop(order: EngineOrder) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(order))
    return int(uvloop.run(_serve(order)))


async def _serve(order: EngineOrder) -> int:
    inbox: Inbox[EngineIn] = Inbox("engine")
    wire = connect(order.address, token=order.token, receives=EngineIn, inbox=inbox, notice=_without_front_end)
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: inbox.put(Drain(order.config.server.shutdown_timeout), force=True)
    )
    try:
        await wire.connected(CONNECT_S)
        return await _live(order, inbox, wire)
    except ActorStopped as exc:  # refused by the front end; it knows why
        log.error("%s", exc)
        return 1
    except ConfigError as exc:
        _emit(wire, Stopped(str(exc)))
        return exc.exit_code
    except Exception as exc:
        log.exception("the engine failed")
        _emit(wire, Stopped(f"{type(exc).__name__}: {exc}"))
        return 1
    finally:
        wire.close(LINGER_S)


def _without_front_end(gone: PeerGone) -> EngineIn:
    return Drain(0.0)  # nobody is left to compute for


def _emit(wire: ZmqWire[EngineOut, EngineIn], msg: EngineOut) -> None:
    with suppress(ActorStopped):  # the Drain that says so is in the inbox already
        wire.send(msg)


async def _live(order: EngineOrder, inbox: Inbox[EngineIn], wire: ZmqWire[EngineOut, EngineIn]) -> int:
    def emit(msg: EngineOut) -> None:
        _emit(wire, msg)

    loop = asyncio.get_running_loop()
    building = loop.create_task(assemble(order.config, order.builder, inbox, emit, order.born_s))
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
    try:
        await core.run()  # its last message is Stopped, also when it fails
    except Exception:
        log.exception("the engine failed")
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
