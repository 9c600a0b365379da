"""Token events per second through the real server, with a runner that makes tokens up at no cost.

Everything is real but the model: HTTP, JSON, scheduler, tables, detokenizer, SSE. The server's processes are pinned to
one core (--spread: only the front end, the engine has the other core with this reader), the reader to another.

    python -m benchmarks.streaming                    # 64 streams of 1,000 tokens

Target: >= 20,000 token events per second at 64 streams on one core.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Server, parser, running_server, save, summary

CONFIG = "device: {null_runner: true, threads: 1}\n"
EVENT, END = b"data: {", b"data: [DONE]"


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--streams", type=int, default=64, help="concurrent SSE streams [64]")
    flags.add_argument("--tokens", type=int, default=1000, help="tokens of each [1000]")
    flags.add_argument("--repeat", type=int, default=5, help="rounds [5]")
    flags.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    flags.add_argument("--spread", action="store_true", help="the engine may use the reader's core")
    args = flags.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the server, one for the reader")
    os.sched_setaffinity(0, {cores[1]})
    with running_server("demo", "--max-model-len", "4096", config=CONFIG, cores={cores[0]}) as server:
        server.wait("/readyz")
        if args.spread:
            server.tree()["engine"].cpu_affinity([cores[1]])
        one_round(server, args.streams, 50, args.chat)
        rounds = [one_round(server, args.streams, args.tokens, args.chat) for _ in range(args.repeat)]
    name = "streaming" + ("-chat" if args.chat else "") + ("-spread" if args.spread else "")
    save(
        name,
        args,
        {
            "streams": args.streams,
            "tokens_per_stream": args.tokens,
            "api": "chat completions" if args.chat else "completions",
            "pinning": "front end alone on one core" if args.spread else "front end and engine on one core",
            **{key: summary([r[key] for r in rounds]) for key in rounds[0]},
        },
    )


@dataclass(slots=True)
class Reader:
    """One connection. `tail` keeps the end of the last piece, so that a mark that was cut is counted once."""

    socket: socket.socket
    tail: bytes = b""
    events: int = 0
    done: bool = False

    def read(self) -> int:
        """Events in what has arrived."""
        piece = self.socket.recv(1 << 18)
        if not piece:
            raise SystemExit("the server closed a stream early")
        text = self.tail + piece
        keep = len(EVENT) - 1
        found = text.count(EVENT) - self.tail.count(EVENT)
        if END in text:
            self.done = True
        self.tail = text[-max(keep, len(END)) :]
        self.events += found
        return found


def one_round(server: Server, streams: int, tokens: int, chat: bool) -> dict[str, float]:
    """All streams at once, timed from the moment every one has begun until the first is done."""
    selector = selectors.DefaultSelector()
    readers = [Reader(_ask(server.port, tokens, chat, number)) for number in range(streams)]
    for reader in readers:
        selector.register(reader.socket, selectors.EVENT_READ, reader)
    begun_s = time.perf_counter()
    arrivals: list[tuple[float, int]] = []
    all_begun_s = first_done_s = None
    open_streams = streams
    while open_streams:
        for key, _ in selector.select():
            ready: Reader = key.data
            arrivals.append((time.perf_counter(), ready.read()))
            if ready.done:
                first_done_s = first_done_s or time.perf_counter()
                selector.unregister(ready.socket)
                ready.socket.close()
                open_streams -= 1
        if all_begun_s is None and all(reader.events for reader in readers):
            all_begun_s = time.perf_counter()
    ended_s = time.perf_counter()
    assert all_begun_s is not None
    assert first_done_s is not None
    steady = sum(count for at_s, count in arrivals if all_begun_s < at_s <= first_done_s)
    total = sum(reader.events for reader in readers)
    return {
        "events_per_s": steady / (first_done_s - all_begun_s),
        "events_per_s_whole_round": total / (ended_s - begun_s),
        "events_per_token": total / (streams * tokens),
    }


def _ask(port: int, tokens: int, chat: bool, number: int) -> socket.socket:
    body: dict[str, Any] = {"stream": True, "max_tokens": tokens, "ignore_eos": True, "seed": number}
    if chat:
        body["messages"] = [{"role": "user", "content": f"Tell story number {number}."}]
    else:
        body["prompt"] = [1 + number, 2, 3]
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    connection = socket.create_connection(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


if __name__ == "__main__":
    main()
