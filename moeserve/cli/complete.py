"""`moeserve complete`: continue a text, from -q or line by line."""

from __future__ import annotations

import argparse

from moeserve.cli.talk import Clock, add_talk_flags, print_stream, talk
from moeserve.client import AsyncClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_talk_flags(parser, "continue this text, then end", max_tokens=128)


def run(args: argparse.Namespace) -> int:
    return talk(args, Complete)


class Complete:
    help = "each line is continued; Ctrl-C stops it, Ctrl-D ends"

    def __init__(self, client: AsyncClient, model: str, args: argparse.Namespace) -> None:
        self._client = client
        self._model = model
        self._args = args

    def command(self, line: str) -> bool:
        return False

    async def answer(self, line: str) -> str:
        clock = Clock()
        stream = await self._client.completions.create(
            model=self._model,
            prompt=line,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=self._args.max_tokens,
            temperature=self._args.temperature,
            seed=self._args.seed,
        )
        return await print_stream(stream, lambda choice: choice.text, clock, stats=self._args.stats)
