"""Loss and return of one of several machines under load: lost requests, different tokens, outage.

    python -m benchmarks.lost_machine --start ./start.sh --lose ./lose.sh --back ./back.sh \\
        --url http://10.77.0.1:8000

start.sh starts the server by any launcher and stays in the foreground (SIGTERM ends it). lose.sh
kills everything on one machine, and back.sh makes the machine reachable again. The reference is
what the same server answers while nothing is lost.

Prints and saves each round: `outage_s` is the time from the kill, and `return_s` that from the end
of back.sh, until every stream continues.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import aiohttp

from benchmarks.common import parser, save

READY_S = 180.0


def bodies(streams: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return sampling requests, each with its own seed."""
    common = {
        "max_tokens": max_tokens,
        "temperature": 0.8,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return [
        {"prompt": f"Once upon a time, {i} little foxes", "seed": i, **common}
        for i in range(streams)
    ]


class Stream:
    """One request: its tokens, the times at which they came, and its error, if any."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.error = ""

    async def run(self, session: aiohttp.ClientSession, url: str) -> None:
        """Read the stream to its end."""
        try:
            async with session.post(f"{url}/v1/completions", json=self.body) as answer:
                if answer.status != 200:
                    self.error = await answer.text()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[6:]))
        except aiohttp.ClientError as error:
            self.error = repr(error)

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
        for choice in chunk.get("choices", []):
            self.tokens += choice.get("token_ids", [])
            self.times.append(time.monotonic())


async def ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server accepts requests."""
    deadline = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and server.poll() is None:
            try:
                async with session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.02)
    raise SystemExit(f"{url} was not ready within {READY_S:g} s")


async def answers(url: str, streams: list[Stream]) -> None:
    """Read all streams at once."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(READY_S)) as session:
        await asyncio.gather(*(stream.run(session, url) for stream in streams))


async def lose_once(args: argparse.Namespace, expected: list[Stream]) -> dict[str, Any]:
    """Lose and return the machine once under load."""
    streams = [Stream(stream.body) for stream in expected]
    running = asyncio.create_task(answers(args.url, streams))
    while any(len(stream.tokens) < 10 for stream in streams) and not running.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    lost_at = time.monotonic()
    await asyncio.to_thread(subprocess.run, args.lose, check=True)
    before = [len(stream.tokens) for stream in streams]
    await asyncio.sleep(args.away)
    await asyncio.to_thread(subprocess.run, args.back, check=True)
    back_at = time.monotonic()
    await running
    resumed = [min((at for at in stream.times if at > back_at), default=None) for stream in streams]
    late = [at for at in resumed if at is not None]
    if not late:
        raise SystemExit("all streams had ended before the machine was back: use more --max-tokens")
    return {
        "lost_requests": sum(bool(stream.error) for stream in streams),
        "different": sum(
            mine.tokens != other.tokens for mine, other in zip(streams, expected, strict=True)
        ),
        "tokens_before_the_loss": [min(before), max(before)],
        "streams_that_waited": len(late),
        "return_s": round(max(late) - back_at, 2),
        "outage_s": round(max(late) - lost_at, 2),
        "errors": sorted({stream.error for stream in streams if stream.error}),
    }


async def measure(args: argparse.Namespace, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Run all rounds on a running server."""
    await ready(args.url, server)
    expected = [Stream(body) for body in bodies(args.streams, args.max_tokens)]
    await answers(args.url, expected)
    assert all(len(stream.tokens) == args.max_tokens for stream in expected), [
        it.error for it in expected
    ]
    rounds = [await lose_once(args, expected) for _ in range(args.rounds)]
    return {
        "streams": args.streams,
        "max_tokens": args.max_tokens,
        "away_s": args.away,
        "rounds": rounds,
    }


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--start", required=True)
    flags.add_argument("--lose", required=True)
    flags.add_argument("--back", required=True)
    flags.add_argument("--url", required=True)
    flags.add_argument(
        "--with", dest="launcher", default="ssh", help="its name, in the file's name [%(default)s]"
    )
    flags.add_argument("--streams", type=int, default=16)
    flags.add_argument("--max-tokens", type=int, default=400)
    flags.add_argument(
        "--away", type=float, default=3.0, help="seconds that the machine is gone [%(default)s]"
    )
    flags.add_argument("--rounds", type=int, default=3)
    args = flags.parse_args()
    server = subprocess.Popen(args.start)
    try:
        results = asyncio.run(measure(args, server))
        server.terminate()
        results["exit_code"] = server.wait(60)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    save(f"lost-machine-{args.launcher}", args, results)
    bad = any(it["lost_requests"] or it["different"] for it in results["rounds"])
    return 1 if bad or results["exit_code"] else 0


if __name__ == "__main__":
    sys.exit(main())
