"""The whole HTTP surface against requests that are almost right: always an answer, never a 5xx but
503, nothing kept.

Bodies are the document's own examples, changed; routes are the table's. What fails is shrunk to the
least request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeserve.server import openapi
from moeserve.server.routes import ROUTES

FULL_S = 600.0
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "M" * 50)
TYPES = (
    "application/json",
    "application/json; charset=utf-8",
    "application/json; charset=utf-16",
    "text/plain",
    "",
    "/;=",
)
NUMBERS = (0, -1, 1, 5.0, 1e308, -0.0, 2**31, 2**63, -(2**63) - 1, 10**400)
TEXTS = (
    "",
    "\0",
    "\u202e",
    "<|im_end|>",
    "\ud83d\ude00",
    "a" * 5000,
    "(a+)+$",
    "{{ messages }}",
    "../../etc/passwd",
)


@dataclass(frozen=True)
class Asked:
    """One request as it goes over the wire."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    chunked: bool

    def wire(self) -> bytes:
        lines = [
            self.method.encode() + b" " + self.target + b" HTTP/1.1",
            b"Host: localhost",
            b"Connection: close",
        ]
        lines += [name + b": " + value for name, value in self.headers]
        body = self.body
        if self.chunked:
            lines.append(b"Transfer-Encoding: chunked")
            body = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
        elif body or self.method == "POST":
            lines.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join([*lines, b"", b""]) + body


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
scalars |= st.sampled_from(NUMBERS) | st.sampled_from(TEXTS)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
)
harmless = st.binary(max_size=30).map(
    lambda data: bytes(byte for byte in data if byte not in b"\r\n\0") or b"x"
)


def _examples() -> dict[str, list[Any]]:
    """The document's bodies by operation, each short."""
    spec = json.loads(openapi.document(ROUTES, None, keyed=False))
    found: dict[str, list[Any]] = {}
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            if body := operation.get("requestBody"):
                examples = body["content"].get("application/json", {}).get("examples", {}).values()
                found[f"{method.upper()} {path}"] = [one["value"] for one in examples]
    return found


EXAMPLES = _examples()


@st.composite
def _body(draw: st.DrawFn, route: Any) -> bytes:
    """A body of the route with up to three of its fields, or of those inside, replaced; seldom
    broken or any bytes.
    """
    if route.takes is None:
        return draw(st.sampled_from([b"", b"", b"{}"]) | st.binary(max_size=20))
    body = json.loads(
        json.dumps(draw(st.sampled_from(EXAMPLES.get(f"{route.method} {route.path}") or [{}])))
    )
    for _ in range(draw(st.integers(0, 3))):
        at = body
        while inner := [
            one
            for one in (at.values() if isinstance(at, dict) else at)
            if isinstance(one, dict | list) and one
        ]:
            if not draw(st.booleans()):
                break
            at = draw(st.sampled_from(inner))
        if isinstance(at, list):
            at[draw(st.integers(0, len(at) - 1))] = draw(values)
        else:
            known = [*route.takes.__struct_fields__] if at is body else []
            at[draw(st.sampled_from([*at, *known]) | st.text(max_size=8))] = draw(values)
    data = bytearray(json.dumps(body).encode())
    kind = draw(st.integers(0, 9))
    if kind == 0:
        del data[draw(st.integers(0, len(data))) :]
    elif kind == 1:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    elif kind == 2:
        data = bytearray(draw(st.binary(max_size=50)))
    return bytes(data)


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    route = draw(st.sampled_from(ROUTES))
    path = route.path.encode()
    if route.path.endswith("/"):
        path += draw(
            st.text(max_size=20).map(quote).map(str.encode)
            | harmless.map(lambda data: data.replace(b" ", b"+"))
        )
        path += route.suffix.encode()
    elif draw(st.integers(0, 19)) == 0:
        path += draw(st.sampled_from([b"/", b"//", b"/%2e%2e", b"%00", b";a", b"a" * 9000]))
    known = list(route.query.__struct_fields__) if route.query else []
    names = st.sampled_from([*known, "x"]) | st.text(max_size=6)
    pairs = draw(
        st.lists(
            st.tuples(names, st.text(max_size=8) | st.sampled_from(["1", "true", "nan"])),
            max_size=2,
        )
    )
    query = "&".join(f"{quote(name)}={quote(value)}" for name, value in pairs).encode()
    headers = draw(
        st.lists(
            st.tuples(
                st.sampled_from([b"X-Request-Id", b"Accept", b"Origin", b"Expect", b"X-A"]),
                harmless,
            )
        )
    )
    headers.append((b"Content-Type", draw(st.sampled_from([*TYPES[:1] * 9, *TYPES])).encode()))
    method = draw(st.sampled_from([*[route.method] * 9, *METHODS]))
    target = path + (b"?" + query if query else b"")
    return Asked(
        method, target, tuple(headers[-8:]), draw(_body(route)), draw(st.integers(0, 9)) == 0
    )


async def _check(live: Any, asked: Asked) -> None:
    answer = await live.raw(asked.wire())
    assert answer, "no answer"
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert 200 <= status < 500 or status == 503, answer[:500]
    assert b"\r\nx-request-id: " in head.lower()
    if status >= 400 and asked.method.upper() != "HEAD":
        told = json.loads(body)
        error = told["error"]
        assert len(body) < 4000
        if isinstance(error, str):  # Ollama's shape
            assert told.keys() == {"error"}
        else:
            assert isinstance(error["message"], str)
            assert error.keys() == {"message", "type", "param", "code"} or told["type"] == "error"
    async with asyncio.timeout(20):
        while (  # noqa: ASYNC110
            live.context.running
            or live.context.streams
            or live.engine.rows
            or live.context.body_memory.num_bytes
        ):
            await asyncio.sleep(0.001)


@pytest.fixture
def check(tokenizer: Any, launch: Any) -> Iterator[Any]:
    """Send a request to a server, and check the answer and the state that it leaves.

    The server lives as long as the test.
    """
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        live = runner.run(stack.enter_async_context(launch()))
        yield lambda asked: runner.run(_check(live, asked))
        assert runner.run(live.get("/livez"))[0] == 200
        runner.run(stack.aclose())


def fuzz(check: Any, num: int, **options: Any) -> None:
    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    @given(requests())
    def run(asked: Asked) -> None:
        check(asked)

    run()


def test_a_few_hundred_requests(check):
    fuzz(check, 300, derandomize=True)


@pytest.mark.full("http")
@pytest.mark.timeout(FULL_S + 300)
def test_ten_minutes_of_requests(check):
    until = time.monotonic() + FULL_S
    while time.monotonic() < until:
        fuzz(check, 1000, print_blob=True)
