"""`moeserve complete`: continue a text, from -q or line by line from the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys

from moeserve.cli.answer import Clock, print_stream, stoppable
from moeserve.cli.connect import add_connection_flags, client_from, model_name
from moeserve.client import AsyncClient
from moeserve.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection_flags(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="continue this text, then end")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest continuation in tokens [128]")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same continuation")
    parser.add_argument("--stats", action="store_true", help="print time to first token and tokens per second")


def run(args: argparse.Namespace) -> int:
    with asyncio.Runner() as runner:
        client = runner.run(_open(args))
        try:
            model = runner.run(model_name(client, args.model_name))
            if args.quick is not None:
                return 0 if stoppable(runner, _continue(client, model, args.quick, args)) is not None else 130
            return _each_line(runner, client, model, args)
        finally:
            runner.run(client.close())


async def _open(args: argparse.Namespace) -> AsyncClient:
    return client_from(args)


def _each_line(runner: asyncio.Runner, client: AsyncClient, model: str, args: argparse.Namespace) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401 - line editing and history for input()

        print(f"{model}: each line is continued; Ctrl-C stops it, Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if not line:
            continue
        try:
            if stoppable(runner, _continue(client, model, line, args)) is None:
                print("\n[stopped]", file=sys.stderr)
        except RequestError as error:
            print(f"\n{error}", file=sys.stderr)


async def _continue(client: AsyncClient, model: str, text: str, args: argparse.Namespace) -> str:
    clock = Clock()
    stream = await client.completions.create(
        model=model,
        prompt=text,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
    )
    answer = await print_stream(stream, lambda choice: choice.text, clock)
    print()
    if args.stats:
        print(f"[{clock}]", file=sys.stderr)
    return answer
