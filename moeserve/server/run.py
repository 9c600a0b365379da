"""`moeserve serve`: listens first, loads the model meanwhile, and ends in order.

The first SIGTERM or Ctrl-C drains: /readyz says 503 at once, running requests may finish for `shutdown_timeout`
seconds, then they end with finish_reason "abort"; the exit code is 0. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from moeserve.cluster.logs import set_up_logging
from moeserve.config import Config, ServerConfig
from moeserve.errors import AddressInUse, ConfigError
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.open import open_front_end
from moeserve.messages import Ready
from moeserve.server.app import App, Auth, Context
from moeserve.server.banner import hello, ready_lines
from moeserve.server.http import Handler, HttpServer, watch
from moeserve.server.routes import ROUTES

log = logging.getLogger(__name__)

BACKLOG = 1024
FLUSH_S = 5.0  # for the ends of answers to reach their clients

T = TypeVar("T")
OpenFrontEnd = Callable[[], AbstractAsyncContextManager[FrontEnd]]


def serve(config: Config) -> int:
    """Runs until a signal comes; returns the exit code. Raises ConfigError or EngineDied if the server cannot go on."""
    set_up_logging(config.server.log_level, config.server.log_format)
    auth = Auth(config.server)
    sock = bind(config.server)

    open_it = partial(open_front_end, config, child=True, max_queued=config.server.max_queued_requests)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run(Context(config.server, auth), sock, open_it))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def bind(config: ServerConfig) -> socket.socket:
    """Returns a listening socket. Raises AddressInUse or ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {config.host}: {error}") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # clients may connect from now on; they are answered once the loop runs
    except OSError as error:
        sock.close()
        if error.errno in (98, 48):  # EADDRINUSE on Linux and on macOS
            raise AddressInUse(
                f"port {config.port} of {config.host} is in use; choose another with --port, or --port 0 for any"
            ) from error
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


@asynccontextmanager
async def listening(sock: socket.socket, handler: Handler) -> AsyncIterator[HttpServer]:
    """Answers requests on `sock` inside the block; at its end, connections that are still open are cut off."""
    loop = asyncio.get_running_loop()
    server = HttpServer(handler)
    acceptor = await loop.create_server(server, sock=sock, backlog=BACKLOG)
    heads = asyncio.create_task(server.watch_heads(), name="slow heads")
    try:
        yield server
    finally:
        heads.cancel()
        acceptor.close()
        server.pre_shutdown()
        await server.shutdown(0.5)
        await asyncio.gather(heads, return_exceptions=True)


async def run(context: Context, sock: socket.socket, open_it: OpenFrontEnd) -> int:
    """Runs the server on one loop, from listening to the last answer; returns the exit code."""
    stop = StopSignals()
    stop.install()
    async with listening(sock, App(context, ROUTES)):
        log.info("listening on %s", hello(context, sock))
        streams = asyncio.create_task(watch(context.streams, context.config.sse_ping_s), name="streams")
        try:
            async with open_it() as front:
                context.front = front
                await _serve(context, front, sock, stop)
        finally:
            streams.cancel()
            await asyncio.gather(streams, return_exceptions=True)
            stop.remove()
    return 0


async def _serve(context: Context, front: FrontEnd, sock: socket.socket, stop: StopSignals) -> None:
    if front.tokenizer is not None:
        await asyncio.to_thread(front.tokenizer.warm_up)  # the engine takes longer to load than this
    ready: Ready | None = await _unless(stop, front.wait_ready())
    if ready is not None:
        context.started = True
        seconds = time.monotonic() - context.began
        log.info("ready in %.1f s", seconds)
        if context.config.log_format == "text":
            sys.stdout.write("\n".join(ready_lines(context, front, ready, sock, seconds)) + "\n")
            sys.stdout.flush()
        cause = await _unless(stop, front.died())
        if cause is not None:
            raise cause
    context.draining = True
    log.info("stopping: %d requests may finish within %g s", len(context.running), context.config.shutdown_timeout)
    await front.drain(context.config.shutdown_timeout)
    await _flush(context)


async def _flush(context: Context) -> None:
    deadline = time.monotonic() + FLUSH_S
    while (context.running or context.streams) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def _unless(stop: StopSignals, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of `work`, or None if a stop is asked for first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.asked.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


class StopSignals:
    """The first SIGTERM or SIGINT sets `asked`; the second ends the process, and the engine with it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def install(self) -> None:
        """Takes over both signals."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def remove(self) -> None:
        """Gives both signals back."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            log.warning("second %s: stopping now", signal.Signals(number).name)
            os._exit(128 + number)  # the engine process ends when its parent does
        log.info("%s: draining; once more stops now", signal.Signals(number).name)
        self.asked.set()
