"""Processes die, clients vanish, signals come: every request gets one ending, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time

import aiohttp
import psutil

STORY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


async def stream_text(session: aiohttp.ClientSession, url: str, body: dict, events: list[float]) -> str:
    """The whole streamed text; `events` gets the time of each chunk."""
    text = ""
    async with session.post(url + "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                events.append(time.monotonic())
                text += chunk["choices"][0]["text"] if chunk["choices"] else ""
    return text


async def until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


async def test_streams_go_on_after_the_engine_is_killed(own_server):
    bodies = [STORY | {"prompt": f"Once upon a time, {i} little foxes"} for i in range(6)]
    async with aiohttp.ClientSession() as session:
        undisturbed = await asyncio.gather(*(stream_text(session, own_server.url, b, []) for b in bodies))
        events: list[list[float]] = [[] for _ in bodies]
        streams = [
            asyncio.create_task(stream_text(session, own_server.url, b, e)) for b, e in zip(bodies, events, strict=True)
        ]
        await until(lambda: all(len(e) > 20 for e in events))
        engine = own_server.engine()
        engine.kill()
        await until(lambda: own_server.get("/readyz")[0] == 503, 5)
        assert own_server.get("/livez")[0] == 200
        assert await asyncio.gather(*streams) == undisturbed
    assert own_server.get("/readyz")[0] == 200
    assert own_server.engine().pid != engine.pid


async def test_no_engine_survives_a_killed_front_end(own_server):
    engine = own_server.engine()
    own_server.process.kill()
    own_server.process.wait()
    _, alive = psutil.wait_procs([engine], timeout=3)
    assert alive == []


def running_requests(server) -> float:
    for line in server.get("/metrics")[1].splitlines():
        if line.startswith("moeserve:num_requests_running"):
            return float(line.split()[-1])
    raise AssertionError("no such metric")


async def test_a_vanished_client_gives_its_blocks_back(own_server):
    for stream in (True, False):
        sock = socket.create_connection(("127.0.0.1", own_server.port))
        body = json.dumps(STORY | {"stream": stream, "max_tokens": 900}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        await until(lambda: running_requests(own_server) == 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        sock.close()  # a reset, not a polite end
        await until(lambda: running_requests(own_server) == 0, 2)


async def test_sigterm_finishes_what_runs_and_exits_0(own_server):
    events: list[float] = []
    undisturbed = own_server.post("/v1/completions", STORY)[1]["choices"][0]["text"]
    async with aiohttp.ClientSession() as session:
        stream = asyncio.create_task(stream_text(session, own_server.url, STORY, events))
        await until(lambda: len(events) > 5)
        os.kill(own_server.process.pid, signal.SIGTERM)
        await until(lambda: own_server.get("/readyz")[0] == 503, 2)
        assert await stream == undisturbed
    assert own_server.process.wait(10) == 0


async def test_a_slow_reader_hurts_nobody_else(server):
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    body = json.dumps(STORY | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    sock.sendall(head.encode() + b"\r\n\r\n" + body)
    async with aiohttp.ClientSession() as session:
        text = await asyncio.wait_for(stream_text(session, server.url, STORY | {"max_tokens": 50}, []), 20)
    assert text
    sock.close()
    await until(lambda: running_requests(server) == 0)
