"""`moeserve serve`: listens first, loads the model meanwhile, and ends in order.

The first SIGTERM or Ctrl-C drains: /readyz says 503 at once, running requests may finish for
`shutdown_timeout` seconds, then they end with finish_reason "abort"; the exit code is 0. A second
signal ends the process at once.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec
import uvloop

from moeserve.cluster.fleet import Fleet
from moeserve.cluster.host import FleetSnapshot, Root
from moeserve.cluster.launch.protocol import report
from moeserve.cluster.logs import set_up_logging
from moeserve.config import Config, ServerConfig
from moeserve.errors import AddressInUse, ConfigError, Overloaded
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.journal_feed import follow
from moeserve.frontend.open import open_front_end, prepare
from moeserve.frontend.takeover import succeeding
from moeserve.messages import Ready
from moeserve.server.access_log import AccessLog
from moeserve.server.app import App
from moeserve.server.auth import Auth
from moeserve.server.batches import Batches
from moeserve.server.context import Context
from moeserve.server.file_store import FileStore
from moeserve.server.http import HttpServer, raise_file_limit, watch
from moeserve.server.inside import ask
from moeserve.server.reload import Reloads
from moeserve.server.routes import METRICS_ROUTES, PAGES, ROUTES
from moeserve.server.tls import GOODBYE_S, HANDSHAKE_S, tls_of
from moeserve.version import __version__

log = logging.getLogger(__name__)

BACKLOG = 1024
_OPEN_HOSTS = ("127.0.0.1", "::1", "localhost")
FLUSH_S = 5.0  # for the ends of answers to reach their clients

T = TypeVar("T")
OpenFrontEnd = Callable[[], AbstractAsyncContextManager[FrontEnd]]


def serve(config: Config) -> int:
    """Runs until a signal comes; returns the exit code. Raises ConfigError or EngineDied if the
    server cannot go on.
    """
    set_up_logging(config.server.log_level, config.server.log_format)
    raise_file_limit()
    ports = [config.server.port] + (
        [] if config.server.metrics_port is None else [config.server.metrics_port]
    )
    sockets = [bind(config.server, port) for port in ports]
    if config.parallel.standby:
        from moeserve.server.standby import (
            keep_front_ends,
        )  # here, because it needs what starts engines

        return keep_front_ends(config, sockets)
    context = _context(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        open_it = partial(open_front_end, config, child=True, bounded=True)
        return runner.run(run(context, sockets[0], open_it, *sockets[1:]))


def serve_in_turn(
    config: Config, root: Root, sockets: list[socket.socket], turn: SimpleQueue[bytes]
) -> int:
    """Does the same as one front end of several: prepares all that it can, and serves from its turn
    on.
    """
    raise_file_limit()
    context = _context(config)

    async def wait_and_run() -> int:
        """Runs when it is time."""
        ours = asyncio.Event()
        following = asyncio.create_task(follow(root, ours), name="journal")
        prepared = await prepare(config, root)
        document = await asyncio.to_thread(turn.get)
        snapshot = msgspec.json.decode(document, type=FleetSnapshot | None)
        context.began = time.monotonic()
        ours.set()
        streams = list((await following).streams.values())
        assert isinstance(prepared.link, Fleet)
        prepared.link.continue_from(snapshot)
        opened = open_front_end(config, child=True, prepared=prepared)
        return await run(
            context, sockets[0], partial(succeeding, opened, streams, root), *sockets[1:]
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(wait_and_run())


def _context(config: Config) -> Context:
    """Returns the state that all HTTP handlers share. Raises ConfigError."""
    context = Context(config.server, Auth(config.server), tls=tls_of(config.server))
    if config.server.access_log is not None:
        context.observers.append(AccessLog(config.server.access_log))
    if config.server.otel_endpoint is not None:
        from moeserve.server.otel import spans_to  # here, because its library is an extra

        name = config.model.served_model_name or config.model.model
        context.observers.append(spans_to(config.server.otel_endpoint, name))
    return context


def bind(config: ServerConfig, port: int | None = None) -> socket.socket:
    """Returns a socket that listens on `port`, or on the configured one: clients may connect from
    now on.

    Raises AddressInUse or ConfigError.
    """
    host = config.host
    port = config.port if port is None else port
    with ConfigError.instead_of((OSError, UnicodeError), f"--host {host}"):
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        sock = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = (
                f"port {port} of {host} is in use; choose another with --port, or --port 0 for any"
            )
            raise AddressInUse(what) from error
        why = os.strerror(error.errno) if error.errno else error
        raise ConfigError(f"cannot listen on {host}:{port}: {why}") from error
    sock.setblocking(False)
    return sock


@asynccontextmanager
async def listening(
    sock: socket.socket, context: Context, metrics_sock: socket.socket | None = None
) -> AsyncIterator[None]:
    """Answers requests on `sock` inside the block; at its end, connections that are still open are
    cut off.

    metrics_sock: answers what needs no key there, metrics included.
    """
    reloads = Reloads()
    if context.auth.paths:
        reloads.add(context.auth.paths, context.auth.reload)
    for observer in context.observers:
        if isinstance(observer, AccessLog):
            reloads.add([], observer.reopen)  # its file changes with each line
    if context.tls is not None:
        reloads.add(context.tls.paths, context.tls.reload)
    async with AsyncExitStack() as stack:
        for observer in context.observers:
            stack.callback(observer.close)
        app = App(context, ROUTES + PAGES if context.config.ui else ROUTES)
        server = HttpServer(app)
        context.batches = await _batches(app, server)
        await stack.enter_async_context(_accepting(sock, context, server))
        if context.batches is not None:
            stack.push_async_callback(context.batches.close)
        if metrics_sock is not None:
            await stack.enter_async_context(
                _accepting(metrics_sock, context, HttpServer(App(context, METRICS_ROUTES)))
            )
        timers = [
            asyncio.create_task(watch(context.streams, context.config.sse_ping_s), name="streams"),
            asyncio.create_task(reloads.run(), name="reloads"),
            asyncio.create_task(report(lambda: context.phase.name), name="report"),
        ]
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
            await asyncio.gather(*timers, return_exceptions=True)


@asynccontextmanager
async def _accepting(
    sock: socket.socket, context: Context, server: HttpServer
) -> AsyncIterator[None]:
    tls: dict[str, Any] = {}
    if context.tls is not None:
        tls = {
            "ssl": context.tls.context,
            "ssl_handshake_timeout": HANDSHAKE_S,
            "ssl_shutdown_timeout": GOODBYE_S,
        }
    acceptor = await asyncio.get_running_loop().create_server(
        server, sock=sock, backlog=BACKLOG, **tls
    )
    heads = asyncio.create_task(server.watch_heads(), name="slow heads")
    try:
        yield
    finally:
        heads.cancel()
        acceptor.close()
        server.pre_shutdown()
        await server.shutdown(0.5)
        await asyncio.gather(heads, return_exceptions=True)


async def _batches(app: App, server: HttpServer) -> Batches | None:
    """Returns the batches, those of an earlier server among them, if there is a folder for files."""
    config = app.context.config
    if config.files_dir is None:
        return None

    async def num_slots() -> int:
        """Returns how many sequences can run at once, when a model is there."""
        while True:
            try:
                return app.context.serving()[1].max_num_seqs
            except Overloaded as error:
                await asyncio.sleep(error.retry_after_s)

    store = await asyncio.to_thread(FileStore, Path(config.files_dir), config.files_bytes)
    return Batches(store, partial(ask, app, server()), num_slots)


async def run(
    context: Context,
    sock: socket.socket,
    open_it: OpenFrontEnd,
    metrics_sock: socket.socket | None = None,
) -> int:
    """Runs the server on one loop, from listening to the last answer; returns the exit code."""
    stop = _stop_signals()
    async with listening(sock, context, metrics_sock):
        log.info("listening on %s", _hello(context, sock))
        async with open_it() as front:
            context.front = front
            await _serve(context, front, sock, stop)
    return 0


async def _serve(
    context: Context, front: FrontEnd, sock: socket.socket, stop: asyncio.Event
) -> None:
    if front.tokenizer is not None:
        await asyncio.to_thread(
            front.tokenizer.warm_up
        )  # the engine takes longer to load than this
    ready: Ready | None = await _unless(stop, front.wait_ready())
    if ready is not None:
        context.started = True
        seconds = time.monotonic() - context.began
        if context.config.log_format == "json":
            log.info("ready in %.1f s", seconds)
        else:
            sys.stdout.write("\n".join(_ready_lines(context, front, ready, sock, seconds)) + "\n")
            sys.stdout.flush()
        cause = await _unless(stop, front.died())
        if cause is not None:
            raise cause
    context.draining = True
    if context.batches is not None:
        await context.batches.stop()  # the next start goes on with them
    log.info(
        "stopping: %d requests may finish within %g s",
        len(context.running),
        context.config.shutdown_timeout,
    )
    await front.drain(context.config.shutdown_timeout)
    deadline = time.monotonic() + FLUSH_S
    while (context.running or context.streams) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of `work`, or None if a stop is asked for first."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def _stop_signals() -> asyncio.Event:
    """Returns an event that the first SIGTERM or SIGINT sets; the second ends the process, and the
    engine with it.
    """
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        """Called by the loop."""
        if asked.is_set():
            log.warning("second %s: stopping now", number.name)
            os._exit(128 + number)  # the engine process ends when its parent does
        log.info("%s: draining; once more stops now", number.name)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return asked


def _base_url(sock: socket.socket, context: Context) -> str:
    """Returns a URL under which this machine reaches the server."""
    scheme = "http" if context.tls is None else "https"
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _hello(context: Context, sock: socket.socket) -> str:
    """Returns the first line, printed while the model is still loading."""
    warning = ""
    if not context.auth.required and context.config.host not in _OPEN_HOSTS:
        warning = "; ANYONE who reaches this address may use it: set --api-key-file"
    return f"{_base_url(sock, context)} (moeserve {__version__}; loading the model){warning}"


def _ready_lines(
    context: Context, front: FrontEnd, ready: Ready, sock: socket.socket, seconds: float
) -> list[str]:
    """Returns the lines for people, printed once the model is ready. seconds: how long the start
    took.
    """
    url = _base_url(sock, context)
    model = front.model_name
    tokens = (ready.num_blocks - 1) * ready.block_size
    lines = [
        "",
        f"moeserve {__version__} is ready in {seconds:.1f} s: {url}",
        f"  model    {model}: {ready.architecture}, {_count(ready.num_params)} parameters, "
        f"{_count(ready.num_active_params)} active, {ready.dtype} on {ready.device}, {_size(ready.weight_bytes)}",
        f"  context  {ready.max_model_len:,} tokens; cache {tokens:,} tokens; {ready.max_num_seqs} sequences at once",
        *_ranks(front),
        f"  keys     {'required' if context.auth.required else 'none needed'}; routes: {url}/openapi.json",
        *([f"  page     {url}/ to talk to it and to watch it"] if context.config.ui else []),
        *[f"  note     {note}" for note in ready.notes],
        "",
    ]
    if front.chat_template is not None:
        lines += [*_how_to_talk(url, model, keyed=context.auth.required), ""]
    return lines


def _ranks(front: FrontEnd) -> list[str]:
    if front.fleet is None:
        return []
    view = front.fleet.view
    how = f"experts over {view.dp * view.tp} ranks" if view.together else "each on its own"
    pids = ", ".join(str(engine.pid) for engine in view.engines)
    return [
        f"  ranks    {view.dp} engines (dp) of {view.tp} processes (tp), {how}; engine processes {pids}"
    ]


def _how_to_talk(url: str, model: str, *, keyed: bool) -> list[str]:
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    body = f'{{"messages": [{{"role": "user", "content": "Tell me a story."}}], "stream": true, "model": "{model}"}}'
    argument = ', api_key="KEY"' if keyed else ""
    return [
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'",
        "",
        "import asyncio, moeserve",
        f'client = moeserve.AsyncClient(base_url="{url}/v1"{argument})',
        'ask = client.chat.completions.create(messages=[{"role": "user", "content": "Tell me a story."}])',
        "print(asyncio.run(ask).choices[0].message.content)",
    ]


def _count(number: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
