"""`moeserve chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from moeserve.cli.talk import Session, add_talk_flags, note, print_stream, talk
from moeserve.client import AsyncClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a conversation."""
    add_talk_flags(parser, "ask this, print the answer, end")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message at the start of the conversation")


def run(args: argparse.Namespace) -> int:
    """Talks until the input ends. Returns the exit code."""
    return talk(args, ChatSession)


class ChatSession(Session):
    """The conversation so far. An answer that was stopped or failed is forgotten together with its question."""

    help = "/clear forgets the conversation, /quit ends, /help prints this; Ctrl-C stops an answer"

    def __init__(self, client: AsyncClient, model: str, args: argparse.Namespace) -> None:
        super().__init__(client, model, args)
        self._first = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        self.messages: list[dict[str, Any]] = [*self._first]

    def command(self, line: str) -> bool:
        """Forgets the conversation at /clear; another word with a slash is answered with the help."""
        if line == "/clear":
            self.messages = [*self._first]
        elif line.startswith("/"):
            note(self.help)
        return line.startswith("/")

    async def answer(self, line: str) -> None:
        """Prints the answer, says why if it is cut short, and remembers both."""
        messages = [*self.messages, {"role": "user", "content": line}]
        stream = await self.client.chat.completions.create(messages=messages, stream=True, **self.options)
        text, reason = await print_stream(stream, lambda choice: choice.delta.content, stats=self.args.stats)
        if reason == "length":
            limit = self.args.max_tokens
            note(f"[cut off at --max-tokens {limit}]" if limit else "[cut off: the context is full]")
        self.messages = [*messages, {"role": "assistant", "content": text}]
