"""Runs the server of `moeserve serve`: listens first, loads the model meanwhile, and shuts down.

The first SIGTERM or Ctrl-C drains: /readyz answers 503 at once, and running requests may finish
within `shutdown_timeout` seconds, after which they end with finish_reason "abort". The exit code is
0. A second signal ends the process at once.
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
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO, TypeVar

import msgspec
import uvloop

from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.cluster.fleet import Fleet
from moeserve.cluster.host import FleetSnapshot, Root
from moeserve.cluster.launch.protocol import report_changes
from moeserve.cluster.logs import set_up_logging
from moeserve.config import Config, ServerConfig
from moeserve.errors import AddressInUse, ConfigError, Overloaded
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.journal import StreamLog
from moeserve.frontend.journal_feed import follow
from moeserve.frontend.open import open_front_end, prepare
from moeserve.frontend.takeover import succeeding
from moeserve.hub.progress import Progress, TerminalProgress
from moeserve.loader.model_dir import cached_model, hub_name_of
from moeserve.messages import Ready
from moeserve.models.fetch import local_config
from moeserve.server.access_log import AccessLog
from moeserve.server.app import App
from moeserve.server.auth import Auth
from moeserve.server.batches import Batches
from moeserve.server.context import Context
from moeserve.server.file_store import FileStore
from moeserve.server.hosts import is_loopback
from moeserve.server.http import HttpServer, StreamWatch, raise_file_limit
from moeserve.server.internal import ask
from moeserve.server.reload import Reloads
from moeserve.server.routes import METRICS_ROUTES, PAGES, ROUTES
from moeserve.server.tls import GOODBYE_S, HANDSHAKE_S, tls_of
from moeserve.version import __version__

log = logging.getLogger(__name__)

CONNECTION_BACKLOG = 1024
FLUSH_TIMEOUT_S = 5.0  # time for the last events to reach the clients
HANDLER_TIMEOUT_S = 0.5  # time for handlers that still run then
JOURNAL_PAUSE_S = 1.0  # pause before following a failed journal again

T = TypeVar("T")
OpenFrontEnd = Callable[[], AbstractAsyncContextManager[FrontEnd]]
Fetch = Callable[[], Coroutine[Any, Any, OpenFrontEnd]]


def serve(config: Config) -> int:
    """Serve until a signal comes. Return the exit code.

    Raise ConfigError or EngineDied if the server cannot continue.
    """
    set_up_logging(config.server.log_level, config.server.log_format)
    raise_file_limit()
    ports = [config.server.port]
    if config.server.metrics_port is not None:
        ports.append(config.server.metrics_port)
    sockets = [bind(config.server, port) for port in ports]
    if config.parallel.standby:
        return _serve_with_standby(config, sockets)
    context = _make_context(config)
    fetch = partial(_fetch, config, context)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(context, sockets[0], fetch, *sockets[1:]))


async def _fetch(config: Config, context: Context) -> OpenFrontEnd:
    """Download the model if need be. Return a function that opens a front end for it.

    Raise ConfigError.
    """
    return partial(open_front_end, await _local_config(config, context), child=True, bounded=True)


async def _local_config(config: Config, context: Context) -> Config:
    """Return the settings with the model's path, and show the download on all surfaces."""
    as_bar = None if config.server.log_format == "text" else False
    with TerminalProgress(as_bar=as_bar) as terminal:

        def report(progress: Progress) -> None:
            context.show_download(progress)
            terminal(progress)

        config = await local_config(config, report)
    context.download = None
    return config


def _serve_with_standby(config: Config, sockets: list[socket.socket]) -> int:
    """Serve with a standby front end. Download the model first, once for both front ends."""
    # Imported only here, because it imports the code that starts engines.
    from moeserve.server.standby import keep_front_ends

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        local = runner.run(_fetch_for_standby(config, sockets))
    return 0 if local is None else keep_front_ends(local, sockets)


async def _fetch_for_standby(config: Config, sockets: list[socket.socket]) -> Config | None:
    """Return the settings with the model's path, or None after a signal.

    Answer probes while the model is downloaded, on copies of the sockets, as they are closed then.
    """
    name = hub_name_of(config.model.model)
    if name is None or cached_model(name) is not None:
        return await local_config(config, TerminalProgress())
    # Batches are left to the front end that will serve.
    server = replace(config.server, files_dir=None)
    context = _make_context(replace(config, server=server))
    stop = _stop_signals()
    copies = [sock.dup() for sock in sockets]
    async with listening(copies[0], context, *copies[1:]):
        log.info("listening on %s", _listening_text(context, copies[0]))
        return await _unless_stopped(stop, _local_config(config, context))


def serve_in_turn(
    config: Config, root: Root, sockets: list[socket.socket], turn: SimpleQueue[bytes]
) -> int:
    """Prepare a front end under --standby, and serve when its turn comes. Return the exit code.

    turn: gets the FleetSnapshot of the previous front end as JSON, or null, when this one's turn
    comes.
    """
    raise_file_limit()
    context = _make_context(config)

    async def wait_and_run() -> int:
        is_active = asyncio.Event()
        following = spawn(_previous_streams(root, is_active), name="journal", on_error=log_error)
        prepared = await prepare(config, root)
        document = await asyncio.to_thread(turn.get)
        snapshot = msgspec.json.decode(document, type=FleetSnapshot | None)
        context.began_at_s = time.monotonic()
        is_active.set()
        streams = await following
        # The files may have changed since this process started: a revoked key must not be valid.
        await _make_reloads(context).check(force=True)
        assert isinstance(prepared.link, Fleet)
        prepared.link.continue_from(snapshot)
        opened = open_front_end(config, child=True, prepared=prepared)

        async def fetch() -> OpenFrontEnd:  # the root process has downloaded the model
            return partial(succeeding, opened, streams, root)

        return await run(context, sockets[0], fetch, *sockets[1:])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(wait_and_run())


async def _previous_streams(root: Root, is_active: asyncio.Event) -> list[StreamLog]:
    """Return the streams of the previous front end, once this one is active.

    A bug in this only loses streams.
    """
    while not is_active.is_set():
        try:
            journal = await follow(root, is_active)
            return list(journal.streams.values())
        except Exception as error:
            log_error("journal", error)
        await asyncio.sleep(JOURNAL_PAUSE_S)
    return []


def _make_context(config: Config) -> Context:
    """Return the state that all HTTP handlers share. Raise ConfigError."""
    context = Context(config.server, Auth(config.server), tls=tls_of(config.server))
    if config.server.access_log is not None:
        context.observers.append(AccessLog(config.server.access_log))
    if config.server.otel_endpoint is not None:
        from moeserve.server.otel import spans_to  # its library is optional

        name = (config.model.served_model_name or config.model.model).partition(",")[0]
        context.observers.append(spans_to(config.server.otel_endpoint, name))
    return context


def _make_reloads(context: Context) -> Reloads:
    """Return the files to reload while the server runs."""
    reloads = Reloads()
    auth = context.auth
    if auth.paths:
        reloads.add(auth.paths, auth.read, auth.use)
    for observer in context.observers:
        if isinstance(observer, AccessLog):
            # Only on SIGHUP, since each line changes the file.
            reloads.add([], observer.read, observer.use)
    if (tls := context.tls) is not None:
        reloads.add(tls.paths, tls.read, tls.use)
    return reloads


def bind(config: ServerConfig, port: int | None = None) -> socket.socket:
    """Return a listening socket. Clients can connect from now on.

    port: used instead of the configured one. Raise AddressInUse or ConfigError.
    """
    host = config.host
    if host.startswith("[") and host.endswith("]"):  # an IPv6 address as in a URL
        host = host[1:-1]
    port = config.port if port is None else port
    with ConfigError.instead_of((OSError, UnicodeError), f"--host {config.host}"):
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    dual_stack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        sock = socket.create_server(
            address, family=family, backlog=CONNECTION_BACKLOG, dualstack_ipv6=dual_stack
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} of {host} is in use; choose another one with --port, 0 for any"
            raise AddressInUse(what) from error
        why = os.strerror(error.errno) if error.errno else error
        raise ConfigError(f"cannot listen on {host}:{port}: {why}") from error
    sock.setblocking(False)
    return sock


@asynccontextmanager
async def listening(
    sock: socket.socket, context: Context, metrics_sock: socket.socket | None = None
) -> AsyncIterator[None]:
    """Answer requests on `sock` inside the block. At its end, open connections are closed.

    metrics_sock: answers the probes and /metrics without a key.
    """
    keepalive_s = context.config.keepalive_timeout
    async with AsyncExitStack() as stack:
        for observer in context.observers:
            stack.push_async_callback(asyncio.to_thread, observer.close)
        app = App(context, ROUTES + PAGES if context.config.ui else ROUTES)
        server = HttpServer(app, keepalive_s)
        context.batches = await _open_batches(app, server)
        if context.batches is not None:  # closed after the last request
            stack.push_async_callback(context.batches.close)
        await stack.enter_async_context(_accepting(sock, context, server))
        if metrics_sock is not None:
            metrics_server = HttpServer(App(context, METRICS_ROUTES), keepalive_s)
            await stack.enter_async_context(_accepting(metrics_sock, context, metrics_server))
        await stack.enter_async_context(_make_reloads(context).watching())
        watch = StreamWatch(context.streams, context.config.sse_ping_s)
        timers = [
            spawn(watch.run(), name="streams", on_error=log_error),
            spawn(report_changes(lambda: context.stage), name="report", on_error=log_error),
        ]
        try:
            yield
        finally:
            await cancel(*timers)


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
        server, sock=sock, backlog=CONNECTION_BACKLOG, **tls
    )
    heads = spawn(server.watch_heads(), name="slow heads", on_error=log_error)
    try:
        yield
    finally:
        acceptor.close()
        server.pre_shutdown()
        await server.shutdown(HANDLER_TIMEOUT_S)
        await cancel(heads)


async def _open_batches(app: App, server: HttpServer) -> Batches | None:
    """Return the batches, including those of an earlier run. None if `files_dir` is not set."""
    config = app.context.config
    if config.files_dir is None:
        return None

    async def num_slots() -> int:
        """Return the number of sequences that can run at once. Wait for the model."""
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
    fetch: Fetch,
    metrics_sock: socket.socket | None = None,
) -> int:
    """Run the server on one loop, from listening to the last answer. Return the exit code.

    fetch: downloads the model if need be, and returns a function that returns the front end's
        context, which loads the model.
    metrics_sock: see `listening`.
    """
    stop = _stop_signals()
    async with listening(sock, context, metrics_sock):
        log.info("listening on %s", _listening_text(context, sock))
        open_front = await _unless_stopped(stop, fetch())
        if open_front is None:  # stopped while the model was downloaded
            return 0
        async with open_front() as front:
            context.front = front
            await _serve(context, front, sock, stop)
    return 0


async def _serve(
    context: Context, front: FrontEnd, sock: socket.socket, stop: asyncio.Event
) -> None:
    """Serve until `stop` is set, then drain. Raise the cause if the engine is gone for good."""
    if front.tokenizer is not None:
        await asyncio.to_thread(front.tokenizer.warm_up)  # the engine takes longer to load
    ready: Ready | None = await _unless_stopped(stop, front.wait_ready())
    if ready is not None:
        context.started = True
        startup_s = time.monotonic() - context.began_at_s
        if context.config.log_format == "json":
            log.info("ready in %.1f s", startup_s)
        else:
            print_lines(_ready_lines(context, front, ready, sock, startup_s))
        cause = await _unless_stopped(stop, front.died())
        if cause is not None:
            raise cause
    context.draining = True
    if context.batches is not None:
        await context.batches.stop()  # the next start continues them
    log.info(
        "stopping: %d requests may finish within %g s",
        len(context.running),
        context.config.shutdown_timeout,
    )
    await front.drain(context.config.shutdown_timeout)
    deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
    while (context.running or context.streams) and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def print_lines(lines: list[str]) -> None:
    """Print lines to stdout. A full disk or a closed pipe only gives a warning."""
    try:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        log.warning("the address and the model could not be printed: %s", error)
        _discard_buffer(sys.stdout)


def _discard_buffer(stream: TextIO) -> None:
    """Drop the buffered bytes of a broken stream, which Python would write again at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None if `stop` is set first."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel(task, stopped)


def _stop_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets. The second one ends the process."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("second %s: stopping now", number.name)
            os._exit(128 + number)  # the engine process ends when its parent does
        log.info("%s: draining; a second signal stops at once", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _base_url(sock: socket.socket, context: Context) -> str:
    """Return a URL of the server for clients on this machine."""
    scheme = "http" if context.tls is None else "https"
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _listening_text(context: Context, sock: socket.socket) -> str:
    """Return the text of the first log line, while the model is still loading."""
    warning = ""
    if not context.auth.required and not is_loopback(context.config.host):
        warning = "; ANYONE who can connect may use this server: set --api-key-file"
    return f"{_base_url(sock, context)} (moeserve {__version__}; loading the model){warning}"


def _ready_lines(
    context: Context, front: FrontEnd, ready: Ready, sock: socket.socket, startup_s: float
) -> list[str]:
    """Return the lines that are printed when the model is ready."""
    url = _base_url(sock, context)
    model = front.model_name
    tokens = (ready.num_blocks - 1) * ready.block_size
    keys = "required" if context.auth.required else "none needed"
    lines = [
        "",
        f"moeserve {__version__} is ready in {startup_s:.1f} s: {url}",
        f"  model    {model}: {ready.architecture}, {_format_count(ready.num_params)} parameters, "
        f"{_format_count(ready.num_active_params)} active, {ready.dtype} on {ready.device}, "
        f"{_format_bytes(ready.weight_bytes)}",
        f"  context  {ready.max_model_len:,} tokens; cache {tokens:,} tokens; "
        f"{ready.max_num_seqs} sequences at once",
        *_rank_lines(front),
        f"  keys     {keys}; routes: {url}/openapi.json",
    ]
    if context.config.ui:
        lines.append(f"  page     {url}/ (playground and live engine view)")
    lines += [f"  note     {note}" for note in ready.notes]
    lines.append("")
    if front.chat_template is not None:
        lines += [*_example_lines(url, model, keyed=context.auth.required), ""]
    return lines


def _rank_lines(front: FrontEnd) -> list[str]:
    if front.fleet is None:
        return []
    view = front.fleet.view
    experts = (
        f"experts sharded over {view.dp * view.tp} ranks"
        if view.is_one_group
        else "all experts in each"
    )
    pids = ", ".join(str(engine.pid) for engine in view.engines)
    engines = f"{view.dp} engines (dp) of {view.tp} processes (tp), {experts}"
    return [f"  ranks    {engines}; engine processes {pids}"]


def _example_lines(url: str, model: str, *, keyed: bool) -> list[str]:
    """Return a shell command and a Python program that send a first request."""
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    argument = ', api_key="KEY"' if keyed else ""
    message = '{"role": "user", "content": "Tell me a story."}'
    body = f'{{"messages": [{message}], "stream": true, "model": "{model}"}}'
    json = "-H 'Content-Type: application/json'"
    return [
        f"curl -N {url}/v1/chat/completions {json}{key} -d '{body}'",
        "",
        "import asyncio, moeserve",
        f'client = moeserve.AsyncClient(base_url="{url}/v1"{argument})',
        f"ask = client.chat.completions.create(messages=[{message}])",
        "print(asyncio.run(ask).choices[0].message.content)",
    ]


def _format_count(number: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
