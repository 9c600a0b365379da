"""`moeserve complete`: continue a text, from -q or line by line."""

from __future__ import annotations

import argparse

from moeserve.cli.talk import Session, add_talk_flags, print_stream, talk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of server and sampling."""
    add_talk_flags(parser, "continue this text, then end", max_tokens=128)


def run(args: argparse.Namespace) -> int:
    """Continues lines until the input ends. Returns the exit code."""
    return talk(args, CompleteSession)


class CompleteSession(Session):
    """Each line is a prompt of its own."""

    help = "each line is continued; /quit ends, /help prints this; Ctrl-C stops an answer"

    async def answer(self, line: str) -> None:
        """Prints the continuation."""
        stream = await self.client.completions.create(prompt=line, stream=True, **self.options)
        await print_stream(stream, lambda choice: choice.text, stats=self.args.stats)
