"""Token events per second through the real server, with a runner that makes up tokens at no cost.

    python -m benchmarks.streaming                    # 64 streams x 1,500 tokens, 2.5 ms steps
    python -m benchmarks.streaming --step-ms 0        # as fast as possible

Everything is real but the model: HTTP, JSON, scheduler, detokenizer, SSE. The server's processes
are pinned to one core (with --spread only the front end; the engine shares the reader's core), and
the reader of the streams to another.

With a step every 2.5 ms, 64 streams offer 25,600 tokens per second. A front end that falls behind
puts several tokens into one event, so tokens_per_event stays at 1 only while it keeps up. Without
pauses (--step-ms 0) more tokens come in fewer events.

Target: 20,000 token events per second at 64 streams on one core. Prints and saves rates, tokens per
event and CPU time.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from benchmarks.common import ROOT, Server, cpu_seconds, parser, running_server, save, summary

TOOL = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TEMPLATE = """{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>
{% endfor %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{% endfor %}{% endfor %}assistant: """
EVENT = b"data: {"
END = b"data: [DONE]"


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--streams", type=int, default=64, help="concurrent SSE streams [64]")
    flags.add_argument("--tokens", type=int, default=1500, help="tokens per stream [1500]")
    flags.add_argument(
        "--step-ms", type=float, default=2.5, help="time between steps; 0: none [2.5]"
    )
    flags.add_argument("--repeat", type=int, default=5, help="number of rounds [5]")
    flags.add_argument(
        "--chat", action="store_true", help="chat completions instead of completions"
    )
    flags.add_argument(
        "--tools",
        action="store_true",
        help="chat completions with tools, parsed by the tool format",
    )
    flags.add_argument(
        "--beside", type=Path, help="another checkout, measured in turns with this one"
    )
    flags.add_argument("--spread", action="store_true", help="the engine may use the reader's core")
    args = flags.parse_args()
    api = "tools" if args.tools else "chat" if args.chat else ""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the server, one for the reader")
    os.sched_setaffinity(0, {cores[1]})
    config = f"device: {{null_runner: true, null_step_ms: {args.step_ms}}}\n"
    with ExitStack() as stack:
        if args.tools:
            template = stack.enter_context(NamedTemporaryFile("w", suffix=".jinja"))
            template.write(TEMPLATE)
            template.flush()
            config += f"model: {{chat_template: {template.name}, tool_format: hermes}}\n"
        roots = [ROOT, *filter(None, [args.beside])]
        servers = [
            stack.enter_context(running_server("demo", config=config, cores={cores[0]}, root=r))
            for r in roots
        ]
        for server in servers:
            server.wait("/readyz")
            if args.spread:
                server.tree()["engine"].cpu_affinity([cores[1]])
            one_round(server, args.streams, 50, api)
        turns = [
            [one_round(server, args.streams, args.tokens, api) for server in servers]
            for _ in range(args.repeat)
        ]
    ways = (api, "spread" if args.spread else "", "" if args.step_ms else "unpaced")
    save(
        "-".join(["streaming", *filter(None, ways)]),
        args,
        {
            "streams": args.streams,
            "tokens_per_stream": args.tokens,
            "step_ms": args.step_ms,
            "api": {
                "": "completions",
                "chat": "chat completions",
                "tools": "chat completions with tools",
            }[api],
            "pinning": "front end alone on one core"
            if args.spread
            else "front end and engine on one core",
            **summaries([turn[0] for turn in turns]),
            **({"beside": summaries([turn[1] for turn in turns])} if args.beside else {}),
        },
    )


def summaries(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return the summary of each number over the rounds."""
    return {key: summary([one[key] for one in rounds]) for key in rounds[0]}


@dataclass(slots=True)
class Reader:
    """One connection.

    `tail` keeps the end of the last read, so that an event that was cut is counted once.
    """

    socket: socket.socket
    tail: bytes = b""
    events: int = 0
    done: bool = False

    def read(self) -> int:
        """Read what has arrived and return the number of events in it."""
        piece = self.socket.recv(1 << 18)
        if not piece:
            raise SystemExit("the server closed a stream early")
        text = self.tail + piece
        keep = len(EVENT) - 1
        found = text.count(EVENT) - self.tail.count(EVENT)
        if END in text:
            self.done = True
        elif b"HTTP/1.1 4" in text:
            raise SystemExit(text.decode())
        self.tail = text[-max(keep, len(END)) :]
        self.events += found
        return found


def one_round(server: Server, streams: int, tokens: int, api: str) -> dict[str, float]:
    """Read all streams at once, from the first byte sent to the last one received."""
    selector = selectors.DefaultSelector()
    begun_s = time.perf_counter()
    readers = [Reader(_ask(server.port, tokens, api, number)) for number in range(streams)]
    for reader in readers:
        selector.register(reader.socket, selectors.EVENT_READ, reader)
    before = cpu_seconds(server.tree())
    while selector.get_map():
        for key, _ in selector.select():
            key.data.read()
            if key.data.done:
                selector.unregister(key.data.socket)
                key.data.socket.close()
    passed_s = time.perf_counter() - begun_s
    after = cpu_seconds(server.tree())
    events = sum(reader.events for reader in readers)
    return {
        "events_per_s": events / passed_s,
        "tokens_per_s": streams * tokens / passed_s,
        "tokens_per_event": streams * tokens / events,
        "front_end_us_per_event": 1e6 * (after["front_end"] - before["front_end"]) / events,
        "front_end_core_share": (after["front_end"] - before["front_end"]) / passed_s,
        "engine_core_share": (after["engine"] - before["engine"]) / passed_s,
    }


def _ask(port: int, tokens: int, api: str, number: int) -> socket.socket:
    body: dict[str, Any] = {
        "stream": True,
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": number,
    }
    if api:
        body["messages"] = [{"role": "user", "content": f"Tell story number {number}."}]
        if api == "tools":
            body["tools"] = [{"type": "function", "function": TOOL}]
    else:
        body["prompt"] = [1 + number, 2, 3]
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if api else "/v1/completions"
    connection = socket.create_connection(("127.0.0.1", port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


if __name__ == "__main__":
    main()
