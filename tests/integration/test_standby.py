"""A standby takes over from a dead front end: engines stay, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from moeserve import AsyncClient
from tests.ports import free_port

from .conftest import Server, command_of, running_server

pytestmark = pytest.mark.timeout(400)  # front ends start several times, one after the other
FLAGS = ("--standby", "--dp", "2", "--max-model-len", "512", "--kv-cache-bytes", "64MiB")
BODY = {
    "prompt": "Once upon a time",
    "max_tokens": 40,
    "seed": 7,
    "temperature": 0.8,
    "return_token_ids": True,
}


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.02)


def gone(process: psutil.Process) -> bool:
    """Return whether it has ended; a zombie that its parent has not reaped counts."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def tokens(server: Server) -> list[int]:
    status, answer = server.post("/v1/completions", BODY)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def front_ends(server: Server, root: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the live front ends; the oldest is first and serves.

    `root` is their parent, if it is not the server's first process.
    """
    children = (root or psutil.Process(server.process.pid)).children()
    found = [
        child for child in children if "moeserve.server.front_end_process" in command_of(child)
    ]
    return sorted(found, key=psutil.Process.create_time)


def engines(server: Server) -> set[int]:
    children = psutil.Process(server.process.pid).children()
    return {
        it.pid
        for it in children
        if name_of(it) == "moeserve-engine" or "engine_main" in command_of(it)
    }


def name_of(process: psutil.Process) -> str:
    """Return its name; none if it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def stands_by(server: Server) -> Callable[[], bool]:
    """Return a condition: a standby follows the journal of the active front end."""
    news = ("a standby front end is connected", "takes over", "the standby front end has died")

    def last_news() -> str:
        lines = server.log.read_text().splitlines()
        return next((line for line in reversed(lines) if any(word in line for word in news)), "")

    return lambda: news[0] in last_news()


def kill(process: psutil.Process) -> None:
    process.kill()
    with suppress(psutil.NoSuchProcess):
        process.wait(30)


def admins(folder: Path) -> tuple[str, ...]:
    (folder / "admin").write_text("root\n")
    return "--admin-key-file", str(folder / "admin")


def change(server: Server, what: str, body: object = None) -> dict[str, Any]:
    """Return the answer of POST /v1/admin/..."""
    data = b"" if body is None else json.dumps(body).encode()
    headers = {"X-Api-Key": "root", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/admin/{what}", data, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{what}: {error.code} {error.read().decode()}") from error


def experts(server: Server) -> dict[str, Any]:
    status, text = server.get("/v1/experts")
    assert status == 200, text
    return dict(json.loads(text))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for the tests that kill its front end once each: MAX_TAKEOVERS of them may."""
    with running_server(tmp_path_factory.mktemp("standby") / "log", *FLAGS) as it:
        until(stands_by(it))
        yield it


def test_the_engines_outlive_the_front_end_and_serve_the_next_one(server: Server) -> None:
    expected = tokens(server)
    there = engines(server)
    serving, other = front_ends(server)
    kill(serving)
    server.wait_ready()
    assert tokens(server) == expected
    assert engines(server) == there
    assert len(there) == 2
    assert front_ends(server)[0] == other
    until(stands_by(server))


def test_the_next_one_has_as_many_engines_and_the_experts_where_they_were(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", *FLAGS, *admins(tmp_path)) as server:
        until(stands_by(server))
        scale_and_kill(server)


def scale_and_kill(server: Server) -> None:
    expected = tokens(server)
    assert change(server, "scale", {"dp": 3})["before"] == 2
    for seed in range(6):  # a load that is not even
        server.post("/v1/completions", BODY | {"prompt": "fox fox fox fox", "seed": seed})
    change(server, "rebalance")
    there = engines(server)
    placed = experts(server)["placement"]["experts"]
    for dp in (3, 1):
        if dp == 1:
            assert change(server, "scale", {"dp": 1})["before"] == 3
            there = engines(server)
            placed = experts(server)["placement"]["experts"]
        assert len(there) == dp
        kill(front_ends(server)[0])
        server.wait_ready()
        assert tokens(server) == expected
        assert engines(server) == there
        assert experts(server)["placement"]["experts"] == placed
        until(stands_by(server))
    assert change(server, "scale", {"dp": 2})["before"] == 1
    assert tokens(server) == expected


async def story(
    server: Server, kill_after: int = -1, root: psutil.Process | None = None
) -> tuple[str, str | None]:
    """Return the text and finish reason of a client that reconnects by itself.

    After `kill_after` chunks the front end is killed.
    """
    text = ""
    finish = None
    chunks = 0
    ask = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]
    async with AsyncClient(base_url=f"{server.url}/v1") as client:
        stream = await client.chat.completions.create(
            messages=ask, stream=True, seed=5, max_tokens=150
        )
        async for chunk in stream:
            chunks += 1
            if chunks == kill_after:
                kill(front_ends(server, root)[0])
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    return text, finish


async def test_a_stream_goes_on_behind_its_last_event_with_the_same_text(server: Server) -> None:
    until(stands_by(server))
    expected = await story(server)
    there = engines(server)
    assert await story(server, kill_after=4) == expected
    assert engines(server) == there
    until(stands_by(server))


def test_a_front_end_that_stands_by_is_replaced(server: Server) -> None:
    until(stands_by(server))
    serving, other = front_ends(server)
    kill(other)
    until(lambda: len(front_ends(server)) == 2 and other not in front_ends(server))
    until(stands_by(server))
    assert front_ends(server)[0] == serving
    assert server.get("/readyz")[0] == 200


@pytest.mark.full("ranks")
def test_a_front_end_that_hangs_is_killed_before_the_next_one_serves(server: Server) -> None:
    until(stands_by(server))
    expected = tokens(server)
    there = engines(server)
    serving = front_ends(server)[0]
    serving.suspend()
    until(lambda: gone(serving))
    server.wait_ready()
    assert tokens(server) == expected
    assert engines(server) == there
    until(stands_by(server))


def test_the_engines_outlive_both_front_ends(server: Server) -> None:
    expected = tokens(server)
    there = engines(server)
    for process in reversed(front_ends(server)):
        kill(process)
    server.wait_ready()
    assert tokens(server) == expected
    assert engines(server) == there


def test_an_engine_is_still_replaced_when_it_dies(server: Server) -> None:
    expected = tokens(server)
    there = engines(server)
    os.kill(min(there), signal.SIGKILL)
    until(lambda: len(engines(server) - there) == 1)
    assert tokens(server) == expected


def test_all_end_in_order(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", "--standby", "--max-model-len", "512") as server:
        until(stands_by(server))
        all_of_it = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
        until(lambda: all(gone(process) for process in all_of_it))


def test_nothing_outlives_the_root_process(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", "--standby", "--max-model-len", "512") as server:
        until(stands_by(server))
        all_of_it = psutil.Process(server.process.pid).children(recursive=True)
        kill(psutil.Process(server.process.pid))
        until(lambda: all(gone(process) for process in all_of_it))


def test_settings_that_cannot_work_are_told_once(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="the server ended with 2") as told,
        running_server(tmp_path / "log", "--standby", "--chat-template", "/nowhere/template.jinja"),
    ):
        pass
    assert str(told.value).count("/nowhere/template.jinja") == 1


def machine_1(folder: Path, shared: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Starts it as a service manager does, until machine 0 listens."""
    command = [
        sys.executable,
        "-m",
        "moeserve.cli.main",
        "serve",
        *shared,
        "--threads",
        "1",
        "--node-rank",
        "1",
    ]
    again = f"until {shlex.join(command)}; do sleep 0.2; done"
    with (folder / "node").open("ab") as out:
        return subprocess.Popen(
            ["sh", "-c", again], stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )


def test_the_engines_of_another_machine_outlive_the_front_end_too(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the secret of two machines")
    key.chmod(0o600)
    shared = (
        *FLAGS,
        "--nnodes",
        "2",
        "--rendezvous",
        f"127.0.0.1:{free_port()}",
        "--cluster-key-file",
        str(key),
    )
    shell = machine_1(tmp_path, shared)
    try:
        with running_server(tmp_path / "log", *shared, *admins(tmp_path)) as server:
            until(stands_by(server))
            expected = tokens(server)
            there = engines(server)
            (node,) = psutil.Process(shell.pid).children()
            far = {child.pid for child in node.children()}
            kill(front_ends(server)[0])
            server.wait_ready()
            assert tokens(server) == expected
            assert engines(server) == there
            assert {child.pid for child in node.children()} == far
            until(stands_by(server))
            assert change(server, "drain", {"machine": 1})["dp"] == 1
            assert shell.wait(30) == 0
            kill(front_ends(server)[0])
            server.wait_ready()
            assert tokens(server) == expected
            assert engines(server) == there
            assert experts(server)["machines"] == {"node-0": "here", "node-1": "drained"}
            shell = machine_1(tmp_path, shared)
            until(lambda: experts(server)["dp"] == 2)
            assert tokens(server) == expected
            assert server.stop() == 0
            assert shell.wait(30) == 0
    finally:
        for process in (
            [*psutil.Process(shell.pid).children(), psutil.Process(shell.pid)]
            if shell.poll() is None
            else []
        ):
            process.kill()
        shell.wait()
