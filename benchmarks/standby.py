"""Failover of the front end (kill -9) under many streams: time to serve again, and resumed streams.

    python -m benchmarks.standby

Targets with the demo model: /readyz answers 200 within 2 s, no stream lost, no token different, and
no event received twice. Prints and saves the figures of each kill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from statistics import median
from typing import Any

import aiohttp
import psutil

from benchmarks.common import parser, running_server, save
from benchmarks.lost_machine import READY_S, bodies

AGAIN_S = 0.05


class Stream:
    """A request whose client reconnects with Last-Event-ID whenever the connection breaks."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.tokens: list[int] = []
        self.ids: list[str] = []
        self.returns = 0
        self.moved_at = 0.0  # time of the first token after the last reconnect
        self.error = ""
        self._ended = False

    async def run(self, session: aiohttp.ClientSession, url: str) -> None:
        """Read the stream to its end, over as many connections as necessary."""
        deadline = time.monotonic() + READY_S
        while not self._ended and not self.error and time.monotonic() < deadline:
            headers = {"Last-Event-ID": self.ids[-1]} if self.ids else {}
            try:
                async with session.post(
                    f"{url}/v1/completions", json=self.body, headers=headers
                ) as answer:
                    if answer.status == 200:
                        await self._read(answer)
                    elif answer.status != 503:
                        self.error = f"{answer.status} {await answer.text()}"
            except (aiohttp.ClientError, OSError):
                pass
            if not self._ended:
                self.returns = self.returns + 1
                self.moved_at = 0.0
                await asyncio.sleep(AGAIN_S)
        self.error = self.error or ("" if self._ended else "it did not end")

    async def _read(self, answer: aiohttp.ClientResponse) -> None:
        async for line in answer.content:
            if line.startswith(b"id: "):
                self.ids.append(line[4:].decode().strip())
            elif line.startswith(b"data: [DONE]"):
                self._ended = True
            elif line.startswith(b"data: {"):
                self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
        for choice in chunk.get("choices", []):
            self.tokens += choice.get("token_ids", [])
            self.moved_at = self.moved_at or time.monotonic()


async def answers(url: str, streams: list[Stream]) -> None:
    """Read all streams at once."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(READY_S)
    ) as session:
        await asyncio.gather(*(stream.run(session, url) for stream in streams))


async def kill_once(
    url: str, root: psutil.Process, expected: list[Stream], at_tokens: int
) -> dict[str, Any]:
    """Kill the front end once every stream has `at_tokens` tokens; return the figures."""
    streams = [Stream(stream.body) for stream in expected]
    running = asyncio.create_task(answers(url, streams))
    while any(len(stream.tokens) < at_tokens for stream in streams) and not running.done():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    before = [len(stream.tokens) for stream in streams]
    killed_at = time.monotonic()
    front_ends(root)[0].kill()
    served_s = await served(url, killed_at)
    await running
    moved = [stream.moved_at - killed_at for stream in streams if stream.returns]
    return {
        "served_s": round(served_s, 3),
        "all_streams_moving_s": round(max(moved, default=0.0), 3),
        "returned": len(moved),
        "lost": sum(bool(stream.error) for stream in streams),
        "different": sum(
            mine.tokens != other.tokens for mine, other in zip(streams, expected, strict=True)
        ),
        "repeated_events": sum(len(stream.ids) - len(set(stream.ids)) for stream in streams),
        "surplus_tokens": sum(
            max(0, len(stream.tokens) - stream.body["max_tokens"]) for stream in streams
        ),
        "tokens_before_the_kill": [min(before), max(before)],
        "errors": sorted({stream.error for stream in streams if stream.error}),
    }


async def served(url: str, killed_at: float) -> float:
    """Return the seconds from the kill until the server was ready again."""
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < killed_at + READY_S:
            try:
                async with session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        return time.monotonic() - killed_at
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(0.005)
    raise SystemExit(f"{url} was not ready within {READY_S:g} s of the kill")


def front_ends(root: psutil.Process) -> list[psutil.Process]:
    """Return the front ends; the active one is first."""
    found = [
        child
        for child in root.children()
        if "moeserve.server.front_end_process" in " ".join(child.cmdline())
    ]
    return sorted(found, key=psutil.Process.create_time)


async def measure(args: argparse.Namespace, url: str, root: psutil.Process) -> dict[str, Any]:
    """Do all kills on a running server."""
    expected = [Stream(body) for body in bodies(args.streams, args.max_tokens)]
    await answers(url, expected)
    assert all(len(stream.tokens) == args.max_tokens for stream in expected), [
        it.error for it in expected
    ]
    kills = []
    for number in range(args.kills):
        await asyncio.sleep(args.rest_s)  # until the next standby is prepared
        kills.append(await kill_once(url, root, expected, 1 + 13 * number % args.max_tokens))
        print(json.dumps(kills[-1]), file=sys.stderr)
    return {
        "streams": args.streams,
        "max_tokens": args.max_tokens,
        "median_served_s": median(kill["served_s"] for kill in kills),
        "longest_served_s": max(kill["served_s"] for kill in kills),
        "lost": sum(kill["lost"] for kill in kills),
        "different": sum(kill["different"] for kill in kills),
        "repeated_events": sum(kill["repeated_events"] for kill in kills),
        "kills": kills,
    }


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--dp", type=int, default=2)
    flags.add_argument("--streams", type=int, default=32)
    flags.add_argument("--max-tokens", type=int, default=300)
    flags.add_argument(
        "--kills", type=int, default=4, help="more than 5 within five minutes end the server"
    )
    flags.add_argument(
        "--rest-s", type=float, default=4.0, help="seconds between kills [%(default)s]"
    )
    args = flags.parse_args()
    words = ("--standby", "--dp", str(args.dp), "--threads", "1", "--max-model-len", "1024")
    with running_server("demo", *words) as server:
        server.wait("/readyz")
        results = asyncio.run(measure(args, f"http://127.0.0.1:{server.port}", server.process))
        server.process.terminate()
        results["exit_code"] = server.process.wait(60)
    save("standby", args, results)
    return 1 if results["lost"] or results["different"] or results["exit_code"] else 0


if __name__ == "__main__":
    sys.exit(main())
