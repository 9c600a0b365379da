"""CPU time per streamed chunk in a client: moeserve's beside the `openai` package.

    python -m benchmarks.client

Both clients read the same bytes from a local server, in turns. Prints and saves microseconds of CPU
time per chunk.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time

from benchmarks.common import parser, save, summary
from moeserve import AsyncClient

CHUNK = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"demo","choices":'
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--chunks", type=int, default=20_000, help="chunks per stream [20,000]")
    flags.add_argument("--repeat", type=int, default=5, help="rounds of both clients [5]")
    args = flags.parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    server = multiprocessing.get_context("fork").Process(
        target=answer, args=(listener, args.chunks), daemon=True
    )
    server.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    rounds = asyncio.run(measure(url, args.chunks, args.repeat))
    server.terminate()
    save(
        "client",
        args,
        {
            "chunks": args.chunks,
            **{f"{name}_us_per_chunk": summary(us) for name, us in rounds.items()},
        },
    )


def answer(listener: socket.socket, chunks: int) -> None:
    """Send the same bytes to every request, one connection after another."""
    body = CHUNK * chunks + b"data: [DONE]\n\n"
    while True:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1 << 16).find(b"POST") >= 0:
                connection.sendall(HEAD % len(body) + body)


async def measure(url: str, chunks: int, repeat: int) -> dict[str, list[float]]:
    """Return microseconds of CPU time per chunk for each client, one sample per round."""
    from openai import AsyncOpenAI

    rounds: dict[str, list[float]] = {"moeserve": [], "openai": []}
    for number in range(repeat + 1):
        async with AsyncClient(url) as ours:
            begun_s = time.process_time()
            count = 0
            async for _ in await ours.completions.create(prompt="x", stream=True):
                count += 1
        rounds["moeserve"].append(1e6 * (time.process_time() - begun_s) / count)
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as theirs:
            begun_s = time.process_time()
            count = 0
            async for _ in await theirs.completions.create(model="demo", prompt="x", stream=True):
                count += 1
        rounds["openai"].append(1e6 * (time.process_time() - begun_s) / count)
        assert count == chunks
        if number == 0:
            rounds = {name: [] for name in rounds}  # discard the first round: imports, warm-up
    return rounds


if __name__ == "__main__":
    main()
