"""Engine processes that die, hang, misreport or lose their parent, seen from the front end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeserve.actor import zmq_wire
from moeserve.actor.supervisor import RestartPolicy
from moeserve.cluster import engine_supervisor
from moeserve.cluster.link import EngineGone
from moeserve.cluster.order import without_secrets
from moeserve.config import Config, ServerConfig
from moeserve.messages import PROTOCOL_VERSION, Drain, Phase, Pong, Ready, StepOutput, Stopped

Open = Callable[..., Any]

FAST = RestartPolicy(first_pause_s=0.01, max_pause_s=0.05, max_deaths=2)


def gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie that its parent has not reaped counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_a_killed_engine_is_replaced_and_nothing_of_it_comes_after_its_end(
    child: Open,
) -> None:
    async with child("endless", policy=FAST) as (link, reader):
        first = await reader.ready()
        reader.submit(1, max_tokens=10_000)
        await reader.until(lambda msg: isinstance(msg, StepOutput))
        os.kill(first.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        end = await reader.gone()
        assert time.monotonic() - killed_s < 15
        assert (end.exit_code, end.restart_in_s) == (-signal.SIGKILL, 0.01)
        assert "was killed by SIGKILL" in end.cause
        assert link.ready is None
        assert not link.healthy

        after = len(reader.seen)
        second = await reader.ready()
        assert second.pid != first.pid
        assert {type(msg) for msg in reader.seen[after:-1]} == {Phase}
        reader.submit(2, max_tokens=3)
        assert len(await reader.finished(2)) == 3


async def test_an_engine_that_hangs_in_native_code_is_killed_and_replaced(
    child: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "INTERVAL_S", 0.05)
    async with child("stuck", policy=FAST, stall_s=1.5) as (link, reader):
        first = await reader.ready()
        await asyncio.sleep(1.6)  # idle is not stalled
        assert link.healthy
        reader.submit(1, max_tokens=100)
        end = await reader.gone()
        assert "made no progress for" in end.cause
        assert end.restarting
        second = await reader.until(lambda msg: isinstance(msg, Ready) and msg.pid != first.pid)
        assert gone(first.pid)
        assert not gone(second.pid)


async def test_a_stopped_engine_counts_as_stalled(
    child: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "INTERVAL_S", 0.05)
    async with child("null", policy=FAST, stall_s=1.5) as (_, reader):
        ready = await reader.ready()
        os.kill(ready.pid, signal.SIGSTOP)
        assert (await reader.gone()).exit_code == -signal.SIGKILL


async def test_a_crash_loop_ends_with_giving_up(child: Open) -> None:
    async with child("crashing", policy=FAST) as (_, reader):
        await reader.ready()
        for expected in (True, True, False):
            reader.submit(1, max_tokens=100)
            end = await reader.gone()
            assert (end.exit_code, end.restarting) == (-signal.SIGABRT, expected)
            if expected:
                await reader.ready()


async def test_a_start_that_hangs_is_cut_short(child: Open) -> None:
    async with child("hang", policy=RestartPolicy(silence_s=1.0)) as (_, reader):
        end = await reader.gone()
        assert "showed no progress for 1 s during start-up" in end.cause
        assert not end.restarting


async def test_an_engine_of_another_version_is_refused_for_good(
    child: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_wire, "PROTOCOL_VERSION", 99)
    async with child("null", policy=FAST) as (_, reader):
        end = await reader.gone()
        assert f"speaks message protocol {PROTOCOL_VERSION}, the listening one 99" in end.cause
        assert "restart it" in end.cause
        assert not end.restarting


async def test_ctrl_c_is_the_front_ends_and_sigterm_drains(child: Open) -> None:
    async with child("endless", policy=FAST) as (_, reader):
        ready = await reader.ready()
        reader.submit(1, max_tokens=50)
        await reader.until(lambda msg: isinstance(msg, StepOutput))
        os.kill(ready.pid, signal.SIGINT)
        os.kill(ready.pid, signal.SIGTERM)
        assert len(await reader.finished(1)) >= 45
        end = await reader.gone()
        assert end.exit_code == 0
        assert Stopped("") in reader.seen


async def test_an_engine_that_obeys_an_order_to_stop_is_not_replaced(child: Open) -> None:
    async with child("endless", policy=FAST) as (link, reader):
        await reader.ready()
        link.send(Drain(5.0))
        end = await reader.gone()
        assert (end.exit_code, end.restarting) == (0, False)


async def test_an_engine_that_dies_on_its_way_to_a_stop_is_replaced(child: Open) -> None:
    async with child("endless", policy=FAST) as (link, reader):
        ready = await reader.ready()
        reader.submit(1, max_tokens=10_000)
        link.send(Drain(5.0))
        await reader.until(lambda msg: isinstance(msg, StepOutput))
        os.kill(ready.pid, signal.SIGKILL)
        assert (await reader.gone()).restarting
        assert await reader.ready()


async def test_an_engine_whose_steps_take_long_is_given_the_time(
    child: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "INTERVAL_S", 0.05)
    async with child("slow_steps", policy=FAST, stall_s=0.1) as (_, reader):
        await reader.ready()
        reader.submit(1, max_tokens=2)
        assert len(await reader.finished(1)) == 2


async def test_the_engine_process_collects_no_garbage_of_its_start(child: Open) -> None:
    async with child("frozen") as (_, reader):
        await reader.ready()
        reader.submit(1, max_tokens=1)  # fails unless what was there at the start is frozen
        assert len(await reader.finished(1)) == 1


async def test_the_front_end_never_sees_heartbeats(
    child: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "INTERVAL_S", 0.02)
    async with child("null") as (link, reader):
        await reader.ready()
        await asyncio.sleep(0.2)
        assert link.healthy
        await link.close(1.0)
        await reader.gone()
        assert not any(isinstance(msg, Pong) for msg in reader.seen)


async def test_keys_do_not_reach_the_engine(child: Open) -> None:
    config = Config(server=ServerConfig(api_key=("sesame",), api_key_file="/k", log_level="error"))
    stripped = without_secrets(config)
    assert stripped.server.log_level == "error"
    assert "sesame" not in str(stripped)
    assert "/k" not in str(stripped)


FRONT_END = """
import asyncio, sys
from moeserve.config import Config
from moeserve.cluster.fleet import Fleet
from moeserve.messages import Submit
from moeserve.sampling import TokenSampling
async def main():
    link = Fleet(Config(), builder="builders:" + sys.argv[1])
    await link.start()
    if sys.argv[1] == "stuck":
        while link.ready is None:
            await asyncio.sleep(0.01)
        sampling = TokenSampling(seed=1, max_tokens=9)
        link.send(Submit(rid=1, tokens=bytes(4), num_prompt=1, sampling=sampling))
    while link.view.engines[0].pid is None:
        await asyncio.sleep(0)
    print(link.view.engines[0].pid, link.scaling._run_dir.path, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("builder", ["stuck", "slow", "hang"])
def test_no_engine_outlives_a_killed_front_end(
    builder: str, monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("TMPDIR", str(short_dir))
    parent = subprocess.Popen(
        [sys.executable, "-c", FRONT_END, builder], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pid, run_dir = parent.stdout.readline().split()
        parent.stdout.close()
        assert not gone(int(pid))
        assert Path(run_dir).parent == short_dir
        time.sleep(0.3)  # let it get somewhere: any moment must do
        parent.kill()
        deadline_s = time.monotonic() + 15
        while not gone(int(pid)):
            assert time.monotonic() < deadline_s, "the engine survived its front end"
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize(
    "module", ["moeserve.cluster.fleet", "moeserve.cluster.engine_main", "moeserve.actor.actor"]
)
def test_nothing_heavy_is_imported_before_the_engine_is_connected(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "numpy", "transformers", "tokenizers", "aiohttp"} & set(loaded)


async def test_what_the_engine_ends_with_is_an_error_of_its_kind() -> None:
    tail = EngineGone(
        exit_code=-11, cause="engine (pid 1) was killed by SIGSEGV", log_tail=("a", "b")
    ).error()
    assert str(tail) == "engine (pid 1) was killed by SIGSEGV\n    a\n    b"
