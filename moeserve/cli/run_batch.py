"""`moeserve run-batch`: answers a file in OpenAI's Batch format with a running or its own server.

A stopped run can be continued: lines that have a result are skipped. An invalid line gets an error
in the output and does not affect others; only an unreachable server ends the run.
"""

import argparse
import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from moeserve.actor.tasks import log_error, spawn
from moeserve.cli.connect import add_url_flag, client_of
from moeserve.cli.settings import add_flags, resolve
from moeserve.client import AsyncClient
from moeserve.config import Config
from moeserve.errors import ConfigError, RequestError, Unreachable
from moeserve.server.batch_file import BatchLine, ResultFile, answer_lines, read_input


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the batch, and those of `moeserve serve`, which --help does not list."""
    parser.usage = (
        "%(prog)s -i IN.jsonl -o OUT.jsonl (--base-url URL | --model MODEL "
        "[flags of `moeserve serve`])"
    )
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="JSON Lines of requests",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="JSON Lines that results are appended to",
    )
    add_url_flag(parser, default=None)
    parser.add_argument(
        "--base-url-key", metavar="KEY", help="API key for --base-url (or use --api-key)"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="without --base-url: serve this model for the batch (default: demo)",
    )
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of concurrent requests [64]",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    add_flags(parser, shown=False, model=False)


def run(args: argparse.Namespace) -> int:
    """Answer the lines that have no result yet. Return the exit code."""
    if args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    if args.base_url and args.model:
        raise ConfigError(
            "--base-url uses a running server and --model starts one: give only one of them"
        )
    code: int = uvloop.run(_run(args))
    return code


async def _run(args: argparse.Namespace) -> int:
    path = args.input_file
    with ConfigError.instead_of(OSError, f"cannot read {path}"):
        lines = read_input(path)
    output = ResultFile(args.output_file)
    with ConfigError.instead_of(OSError, f"cannot read {output.path}"):
        done_keys = output.read()
    if not output.path.parent.is_dir():
        folder = output.path.parent
        raise ConfigError(f"cannot write {output.path}: there is no directory {folder}")
    remaining_lines = [line for line in lines if line.key not in done_keys]
    if done_keys:
        num_done = len(lines) - len(remaining_lines)
        print(f"{num_done} of {len(lines)} lines are answered already", file=sys.stderr)
    if not remaining_lines:
        return 0
    async with AsyncExitStack() as stack:
        if args.base_url:
            key = args.base_url_key or (args.api_key[0] if args.api_key else None)
            client = await stack.enter_async_context(client_of(args.base_url, key))
        else:
            client = await stack.enter_async_context(local_server(resolve(args).config))
        num_failed = await answer(
            client, remaining_lines, output, args.max_concurrency, quiet=args.disable_tqdm
        )
    num_lines = len(remaining_lines)
    print(f"{num_lines} lines answered, {num_failed} of them with an error", file=sys.stderr)
    return 0


@asynccontextmanager
async def local_server(config: Config) -> AsyncIterator[AsyncClient]:
    """Yield a client for a server in this process, with a random port and key.

    Raise the cause if the engine does not start, or finally dies inside the block.
    """
    from moeserve.cluster.logs import set_up_logging
    from moeserve.frontend.open import open_front_end
    from moeserve.server.auth import Auth
    from moeserve.server.context import Context
    from moeserve.server.run import bind, listening

    key = secrets.token_urlsafe(24)
    server = replace(
        config.server,
        host="127.0.0.1",
        port=0,
        api_key=(key,),
        api_key_file=None,
        admin_key_file=None,
    )
    config = replace(
        config, server=replace(server, log_level="error", files_dir=None, max_queue_wait=0.0)
    )
    set_up_logging("error")
    context = Context(config.server, Auth(config.server))
    sock = bind(config.server)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    async with (
        listening(sock, context),
        open_front_end(config, child=True, bounded=True) as front,
        AsyncClient(url, key) as client,
    ):
        context.front = front
        await front.wait_ready()
        context.started = True
        block_task = asyncio.current_task()
        assert block_task is not None
        is_in_block = True
        death = spawn(front.died(), name="death of the engine", on_error=log_error)

        def cancel_block(death: asyncio.Task[Exception]) -> None:
            if is_in_block and not death.cancelled():
                block_task.cancel()

        death.add_done_callback(cancel_block)
        try:
            yield client
        except asyncio.CancelledError:
            if death.done():
                raise death.result() from None
            raise
        finally:
            is_in_block = False
            death.cancel()


async def answer(
    client: AsyncClient,
    lines: list[BatchLine],
    output: ResultFile,
    max_concurrency: int,
    *,
    quiet: bool = False,
) -> int:
    """Write each result as soon as it arrives. Return the number of errors among them.

    Raise ConfigError if the file cannot be written, and Unreachable if the server is gone. Written
    results stay.
    """
    from tqdm import tqdm

    num_failed = 0
    loop = asyncio.get_running_loop()

    async def run_in_writer(work: Callable[..., None], *args: bytes) -> None:
        """Run work on the file in its thread."""
        with ConfigError.instead_of(OSError, f"cannot write {output.path}"):
            await loop.run_in_executor(writer, work, *args)

    async def handle(line: BatchLine) -> None:
        nonlocal num_failed
        is_ok, result = await _send(client, line)
        await run_in_writer(output.append, result)
        num_failed += not is_ok
        bar.update()

    with (
        ThreadPoolExecutor(1, "results") as writer,  # a server may share this loop
        tqdm(total=len(lines), unit="line", disable=quiet, dynamic_ncols=True) as bar,
    ):
        await run_in_writer(output.open)
        try:
            await answer_lines(lines, handle, max_concurrency)
        finally:
            await run_in_writer(output.close)
    return num_failed


async def _send(client: AsyncClient, line: BatchLine) -> tuple[bool, bytes]:
    """Send a line's request. Return whether it succeeded, and the line of the result."""
    if line.fault is not None:
        return False, line.refusal()
    transport = client.transport
    try:
        body, headers = await transport.read("POST", transport.root_url + line.url, line.body)
    except Unreachable:  # a RequestError that ends the run
        raise
    except RequestError as error:
        fields = {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
        encoded = msgspec.json.encode({"error": fields})
        return False, line.result(error.http_status, error.request_id, encoded)
    return True, line.result(200, headers.get("x-request-id"), body)
