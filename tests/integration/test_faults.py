"""Processes die, clients vanish, signals come: every request ends once, nothing is left over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time

import aiohttp
import psutil
import pytest

pytestmark = pytest.mark.timeout(400)  # engines start several times, one after the other

STORY = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
}


async def stream_text(
    session: aiohttp.ClientSession, url: str, body: dict, events: list[float]
) -> str:
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


async def until(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


async def test_a_stopped_engine_makes_the_server_unready_until_it_goes_on(own_server):
    engine = own_server.engine()
    engine.suspend()
    await until(lambda: own_server.get("/readyz")[0] == 503)
    assert json.loads(own_server.get("/readyz")[1])["status"] == "stalled"
    assert own_server.get("/livez")[0] == 200
    engine.resume()
    await until(lambda: own_server.get("/readyz")[0] == 200)


async def test_streams_go_on_after_the_engine_is_killed(own_server):
    bodies = [
        STORY | {"prompt": f"Once upon a time, {i} little foxes", "max_tokens": 200}
        for i in range(6)
    ]
    async with aiohttp.ClientSession() as session:
        undisturbed = await asyncio.gather(
            *(stream_text(session, own_server.url, b, []) for b in bodies)
        )
        events: list[list[float]] = [[] for _ in bodies]
        streams = [
            asyncio.create_task(stream_text(session, own_server.url, b, e))
            for b, e in zip(bodies, events, strict=True)
        ]
        await until(lambda: all(len(e) > 20 for e in events))
        engine = own_server.engine()
        engine.kill()
        await until(lambda: own_server.get("/readyz")[0] == 503)
        assert own_server.get("/livez")[0] == 200
        assert await asyncio.gather(*streams) == undisturbed
    assert own_server.get("/readyz")[0] == 200
    assert own_server.engine().pid != engine.pid


REPLAYED = [
    (
        "/v1/completions",
        {"prompt": "Once upon a time", "n": 3, "seed": 3, "ignore_eos": True, "max_tokens": 400},
    ),
    ("/v1/completions", {"prompt": ["A dog", "A cat"], "seed": 5, "logprobs": 2, "echo": True}),
    (
        "/v1/completions",
        {
            "prompt": "The fox and the " * 20,
            "seed": 7,
            "stop": ["and the", "d. T"],
            "min_tokens": 20,
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "A story!"}], "seed": 9, "logprobs": True},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "A song!"}], "seed": 1, "n": 2, "stop": "e"},
    ),
]
NUM_REPLAYED = 9  # sequences


async def answers(session: aiohttp.ClientSession, url: str) -> list[tuple[object, ...]]:
    """Return the answers to `REPLAYED`, without ids, times and cache hits, which may differ."""

    async def ask(path: str, body: dict) -> tuple[object, ...]:
        options = {
            "max_tokens": 80,
            "temperature": 1.1,
            "presence_penalty": 0.5,
            "return_token_ids": True,
        }
        async with session.post(url + path, json=options | body) as answer:
            assert answer.status == 200, await answer.text()
            found = await answer.json()
        cached = found["usage"].pop("prompt_tokens_details")["cached_tokens"]
        assert cached <= found["usage"]["prompt_tokens"]
        return found["choices"], found["usage"]

    return await asyncio.gather(*(ask(path, body) for path, body in REPLAYED))


def busy(server, num: int) -> bool:
    return running_requests(server) >= num


def taken(server) -> int:
    """Return how many sequences the server has accepted so far, ended ones included."""
    names = "moeserve:num_requests_active", "moeserve:request_success_total"
    return int(
        sum(
            float(line.split()[-1])
            for line in server.get("/metrics")[1].splitlines()
            if line.startswith(names)
        )
    )


async def test_answers_are_the_same_whatever_moment_the_engine_dies(own_server):
    async with aiohttp.ClientSession() as session:
        undisturbed = await answers(session, own_server.url)
        for delay_s in (0.0, 0.2):
            await until(lambda: own_server.get("/readyz")[0] == 200)
            before = taken(own_server)
            asked = asyncio.create_task(answers(session, own_server.url))
            await until(lambda before=before: taken(own_server) == before + NUM_REPLAYED)
            await asyncio.sleep(delay_s)
            own_server.engine().kill()
            assert await asked == undisturbed
    assert running_requests(own_server) == 0


async def test_a_server_whose_engine_keeps_dying_tells_everyone_and_ends(own_server):
    async with aiohttp.ClientSession() as session:
        body = STORY | {"n": 2, "max_tokens": 1500}

        async def ask() -> tuple[int, str]:
            async with session.post(own_server.url + "/v1/completions", json=body) as answer:
                return answer.status, (await answer.json())["error"]["code"]

        asked = [asyncio.create_task(ask()) for _ in range(3)]
        await until(lambda: busy(own_server, 6))
        seen: set[int] = set()
        while own_server.process.poll() is None:
            for engine in psutil.Process(own_server.process.pid).children():
                if engine.pid not in seen:
                    seen.add(engine.pid)
                    engine.kill()
            await asyncio.sleep(0.02)
        assert await asyncio.gather(*asked) == [(503, "engine_lost")] * 3
    assert own_server.process.returncode == 1
    assert "giving up" in own_server.log.read_text()


async def test_an_engine_that_dies_while_the_server_drains_costs_nothing(own_server):
    events: list[float] = []
    async with aiohttp.ClientSession() as session:
        undisturbed = await asyncio.gather(
            stream_text(session, own_server.url, STORY, []), answers(session, own_server.url)
        )
        deaths = own_server.log.read_text().count("was killed by SIGKILL")
        before = taken(own_server)
        stream = asyncio.create_task(stream_text(session, own_server.url, STORY, events))
        asked = asyncio.create_task(answers(session, own_server.url))
        await until(lambda: taken(own_server) == before + NUM_REPLAYED + 1 and events)
        engine = own_server.engine()
        os.kill(own_server.process.pid, signal.SIGTERM)
        await until(lambda: own_server.get("/readyz")[0] == 503)
        engine.kill()
        assert await asyncio.gather(stream, asked) == undisturbed
    assert own_server.process.wait(30) == 0
    log = own_server.log.read_text()
    assert "Traceback" not in log
    assert log.count("was killed by SIGKILL") == deaths + 1


def running_requests(server) -> float:
    for line in server.get("/metrics")[1].splitlines():
        if line.startswith("moeserve:num_requests_running"):
            return float(line.split()[-1])
    raise AssertionError("no such metric")


async def test_a_vanished_client_gives_its_blocks_back(server):
    for stream in (True, False):
        sock = socket.create_connection(("127.0.0.1", server.port))
        body = json.dumps(STORY | {"stream": stream, "max_tokens": 900}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
            f" application/json\r\nContent-Length: {len(body)}"
        )
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        await until(lambda: running_requests(server) == 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        sock.close()  # a reset, not a polite end
        await until(lambda: running_requests(server) == 0)


async def test_a_slow_reader_hurts_nobody_else(server):
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    body = json.dumps(STORY | {"stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
        f" application/json\r\nContent-Length: {len(body)}"
    )
    sock.sendall(head.encode() + b"\r\n\r\n" + body)
    async with aiohttp.ClientSession() as session:
        text = await asyncio.wait_for(
            stream_text(session, server.url, STORY | {"max_tokens": 50}, []), 40
        )
    assert text
    sock.close()
    await until(lambda: running_requests(server) == 0)
