"""What chat and complete share: flags, the loop over lines, and printing an answer as it comes.

Ctrl-C stops an answer, on the server too; at the prompt it ends the command.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from moeserve.cli.connect import add_connection_flags, client_from, model_name
from moeserve.client import AsyncClient, Stream
from moeserve.errors import RequestError


class Talk(Protocol):
    """One command's way to answer a line. help: one line for people at the start."""

    help: str

    async def answer(self, line: str) -> str:
        """Prints the answer and returns it."""
        ...

    def command(self, line: str) -> bool:
        """Handles a line that is not a question; False if it is one."""
        ...


def add_talk_flags(parser: argparse.ArgumentParser, quick: str, max_tokens: int | None = None) -> None:
    add_connection_flags(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help=quick)
    limit = f"longest answer in tokens [{max_tokens or 'as the server likes'}]"
    parser.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=limit)
    parser.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--stats", action="store_true", help="print time to first token and tokens per second")


def talk(args: argparse.Namespace, make: Callable[[AsyncClient, str, argparse.Namespace], Talk]) -> int:
    """Answers --quick, or line after line from the terminal or a pipe. Returns the exit code."""
    with asyncio.Runner() as runner:
        client = client_from(args)
        try:
            name = runner.run(model_name(client, args.model_name))
            here = make(client, name, args)
            if args.quick is None:
                return _each_line(runner, here, name)
            runner.run(here.answer(args.quick))
            return 0
        finally:
            runner.run(client.close())


def _each_line(runner: asyncio.Runner, here: Talk, name: str) -> int:
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - line editing and history for input()

        prompt = "> "
        print(f"{name}: {here.help}", file=sys.stderr)
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return 0
        if line == "/exit":
            return 0
        if not line or here.command(line):
            continue
        try:
            runner.run(here.answer(line))
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)
        except RequestError as error:
            print(f"\n{error}", file=sys.stderr)


@dataclass(slots=True)
class Clock:
    """Times of one answer on the monotonic clock, in seconds."""

    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    tokens: int = 0

    def saw_text(self) -> None:
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last

    def __str__(self) -> str:
        if self.first is None:
            return "no tokens"
        decode_s = self.last - self.first
        rate = f"{(self.tokens - 1) / decode_s:.1f} tok/s" if self.tokens > 1 and decode_s > 0 else "- tok/s"
        return f"TTFT {1e3 * (self.first - self.started):.0f} ms, {self.tokens} tokens, {rate}"


async def print_stream(stream: Stream[Any], text_of: Callable[[Any], str | None], clock: Clock, *, stats: bool) -> str:
    """Writes each piece to stdout at once, then the times to stderr if asked for; returns the whole text."""
    pieces: list[str] = []
    async with stream:
        async for chunk in stream:
            if chunk.usage is not None:
                clock.tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if text := text_of(choice):
                    clock.saw_text()
                    pieces.append(text)
                    print(text, end="", flush=True)
    print(flush=True)
    if stats:
        print(f"[{clock}]", file=sys.stderr)
    return "".join(pieces)
