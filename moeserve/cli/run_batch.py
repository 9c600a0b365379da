"""`moeserve run-batch`: answers a file of OpenAI Batch lines, with a running server or one of its own.

It can be stopped and started again: lines whose custom_id is in the output already are skipped. Each line fails alone;
only a server that is gone ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import BinaryIO

import msgspec

from moeserve.cli.batch_file import BatchLine, fault_line, open_output, read_done, read_input, result_line
from moeserve.cli.local_server import local_server
from moeserve.cli.settings import add_flags, settle
from moeserve.client import AsyncClient
from moeserve.errors import ConfigError, RequestError, Unreachable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s -i IN.jsonl -o OUT.jsonl (--base-url URL | --model MODEL [flags of `moeserve serve`])"
    parser.add_argument("-i", "--input-file", required=True, type=Path, metavar="FILE", help="JSON Lines to answer")
    parser.add_argument("-o", "--output-file", required=True, type=Path, metavar="FILE", help="where results are added")
    parser.add_argument("--base-url", metavar="URL", help="API of a running server, such as http://localhost:8000/v1")
    parser.add_argument("--base-url-key", metavar="KEY", help="key for --base-url")
    parser.add_argument("--model", metavar="MODEL", help="start a server of our own for this model (default: demo)")
    parser.add_argument("--max-concurrency", type=int, default=64, metavar="N", help="lines in flight at once [64]")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_flags(parser, shown=False, model=False)


def run(args: argparse.Namespace) -> int:
    if args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    if args.base_url and args.model:
        raise ConfigError("--base-url asks a running server, --model starts one: give one of them")
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    lines = read_input(args.input_file)
    done = read_done(args.output_file)
    todo = [line for line in lines if line.custom_id not in done]
    if done:
        print(f"{len(lines) - len(todo)} of {len(lines)} lines are answered already", file=sys.stderr)
    if not todo:
        return 0
    async with AsyncExitStack() as stack:
        if args.base_url:
            try:
                client = await stack.enter_async_context(AsyncClient(args.base_url, args.base_url_key))
            except ValueError as error:
                raise ConfigError(f"--base-url: {error}") from None
        else:
            client = await stack.enter_async_context(local_server(settle(args).config))
        output = stack.enter_context(open_output(args.output_file))
        failed = await Batch(client, output, quiet=args.disable_tqdm).answer(todo, args.max_concurrency)
    print(f"{len(todo)} lines answered, {failed} of them with an error", file=sys.stderr)
    return 0


class Batch:
    """Sends lines and writes each result as soon as it is there."""

    def __init__(self, client: AsyncClient, output: BinaryIO, *, quiet: bool = False) -> None:
        self._client = client
        self._output = output
        self._quiet = quiet
        self._failed = 0

    async def answer(self, lines: list[BatchLine], max_concurrency: int) -> int:
        """How many lines ended in an error. Raises Unreachable when the server is gone; what is written stays."""
        from tqdm import tqdm

        waiting = iter(lines)
        bar = tqdm(total=len(lines), unit="line", disable=self._quiet, dynamic_ncols=True)

        async def worker() -> None:
            for line in waiting:  # shared: each worker takes the next line that nobody has
                self._output.write(await self._one(line))
                self._output.flush()
                bar.update()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(max_concurrency, len(lines))):
                    group.create_task(worker())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            bar.close()
        return self._failed

    async def _one(self, line: BatchLine) -> bytes:
        if line.fault is not None:
            self._failed += 1
            return fault_line(line.custom_id, "invalid_request", line.fault)
        transport = self._client.transport
        try:
            body, headers = await transport.read("POST", transport.root_url + line.url, line.body)
        except Unreachable:
            raise
        except RequestError as error:
            self._failed += 1
            inside = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
            encoded = msgspec.json.encode({"error": inside})
            return result_line(line.custom_id, error.http_status, error.request_id, encoded)
        return result_line(line.custom_id, 200, headers.get("x-request-id"), body)
