"""Prints a streamed answer as it comes, and how fast it came."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moeserve.client import Stream

T = TypeVar("T")


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


async def print_stream(stream: Stream[Any], text_of: Callable[[Any], str | None], clock: Clock) -> str:
    """Writes each piece to stdout at once and returns the whole text."""
    pieces: list[str] = []
    async with stream:
        async for chunk in stream:
            if chunk.usage is not None:
                clock.tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if text := text_of(choice):
                    clock.saw_text()
                    pieces.append(text)
                    sys.stdout.write(text)
                    sys.stdout.flush()
    return "".join(pieces)


def stoppable(runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T | None:
    """Runs one answer; Ctrl-C ends it (and so aborts it on the server) and gives None."""
    try:
        return runner.run(work)
    except KeyboardInterrupt:
        return None
