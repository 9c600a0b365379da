"""`moeserve chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from moeserve.cli.talk import Clock, add_talk_flags, print_stream, talk
from moeserve.client import AsyncClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_talk_flags(parser, "ask this, print the answer, end")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message at the start of the conversation")


def run(args: argparse.Namespace) -> int:
    return talk(args, ChatSession)


class ChatSession:
    """The conversation so far. An answer that was stopped or failed is forgotten together with its question."""

    help = "/clear forgets the conversation, /exit ends; Ctrl-C stops an answer"

    def __init__(self, client: AsyncClient, model: str, args: argparse.Namespace) -> None:
        self._client = client
        self._model = model
        self._args = args
        self._first = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        self.messages: list[dict[str, Any]] = [*self._first]

    def command(self, line: str) -> bool:
        if line == "/clear":
            self.messages = [*self._first]
        elif line.startswith("/"):
            print(self.help, file=sys.stderr)
        return line.startswith("/")

    async def answer(self, line: str) -> str:
        asked = [*self.messages, {"role": "user", "content": line}]
        clock = Clock()
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=asked,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=self._args.max_tokens,
            temperature=self._args.temperature,
            seed=self._args.seed,
        )
        text = await print_stream(stream, lambda choice: choice.delta.content, clock, stats=self._args.stats)
        self.messages = [*asked, {"role": "assistant", "content": text}]
        return text
