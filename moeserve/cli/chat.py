"""`moeserve chat`: a conversation in the terminal. Ctrl-C stops the answer, /exit or Ctrl-D ends the chat."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from moeserve.cli.answer import Clock, print_stream, stoppable
from moeserve.cli.connect import add_connection_flags, client_from, model_name
from moeserve.client import AsyncClient
from moeserve.errors import RequestError

HELP = "/clear forgets the conversation, /exit ends; Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection_flags(parser)
    parser.add_argument("-q", "--quick", metavar="MSG", help="ask this, print the answer, end")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message at the start of the conversation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--stats", action="store_true", help="print time to first token and tokens per second")


def run(args: argparse.Namespace) -> int:
    with asyncio.Runner() as runner:
        client = runner.run(_open(args))
        try:
            chat = Chat(client, runner.run(model_name(client, args.model_name)), args)
            if args.quick is not None:
                return 0 if stoppable(runner, chat.answer(args.quick)) is not None else 130
            return _converse(runner, chat)
        finally:
            runner.run(client.close())


async def _open(args: argparse.Namespace) -> AsyncClient:
    return client_from(args)


def _converse(runner: asyncio.Runner, chat: Chat) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401 - line editing and history for input()

        print(f"{chat.model}: {HELP}", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line == "/exit":
            return 0
        if line == "/clear":
            chat.clear()
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            try:
                if stoppable(runner, chat.answer(line)) is None:
                    print("\n[stopped]", file=sys.stderr)
            except RequestError as error:
                print(f"\n{error}", file=sys.stderr)


class Chat:
    """The conversation so far. An answer that was stopped or failed is forgotten together with its question."""

    def __init__(self, client: AsyncClient, model: str, args: argparse.Namespace) -> None:
        self.client = client
        self.model = model
        self.args = args
        self.messages: list[dict[str, Any]] = []
        self.clear()

    def clear(self) -> None:
        system = self.args.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []

    async def answer(self, question: str) -> str:
        asked = [*self.messages, {"role": "user", "content": question}]
        clock = Clock()
        stream = await self.client.chat.completions.create(
            model=self.model,
            messages=asked,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=self.args.max_tokens,
            temperature=self.args.temperature,
            seed=self.args.seed,
        )
        text = await print_stream(stream, lambda choice: choice.delta.content, clock)
        print()
        if self.args.stats:
            print(f"[{clock}]", file=sys.stderr)
        self.messages = [*asked, {"role": "assistant", "content": text}]
        return text
