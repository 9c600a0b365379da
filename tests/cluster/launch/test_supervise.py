"""The launcher's policy; parts are small processes that speak the protocol and end as told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from moeserve.cluster.launch import machine, supervise
from moeserve.cluster.launch.protocol import Order, PartHello
from moeserve.cluster.launch.supervise import Launch
from moeserve.cluster.launch.targets import LaunchTarget
from moeserve.errors import ConfigError

HELLO = (
    f"print('\\x1e' + {json.dumps(json.dumps({'address': '10.0.0.1', 'port': 5}))}, flush=True);"
    " input()\n"
)
# Answers pings until it is told anything else.
FOREVER = "import sys\nwhile sys.stdin.read(1) == '.': print('\\x1epong', flush=True)\n"


def place(name: str, *lines: str, hello: bool = True) -> LaunchTarget:
    return LaunchTarget(name, (sys.executable, "-c", (HELLO if hello else "") + "\n".join(lines)))


def ended(code: int) -> str:
    return f"print('\\x1eended {code}', flush=True)"


async def launch(*places: LaunchTarget, max_restarts: int = 3) -> int:
    orders: list[int] = []

    def order(rank: int, zero: PartHello) -> Order:
        assert zero == PartHello("10.0.0.1", 5)
        orders.append(rank)
        return Order([], {}, "", "")

    return await Launch(places, order, max_restarts).run()


@pytest.mark.parametrize("code", [0, 1, 7])
async def test_machine_0_decides(code: int, capfd: pytest.CaptureFixture[str]) -> None:
    joins = "print('\\x1ejoined', flush=True)"
    assert await launch(place("a", ended(code)), place("b", joins, FOREVER, ended(0))) == code
    assert f"a (machine 0 of 2): ended with code {code}" in capfd.readouterr().err


async def test_machine_0_that_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    assert await launch(place("a", "pass"), place("b", FOREVER)) == 1
    assert "a (machine 0 of 2): lost" in capfd.readouterr().err


async def test_machine_0_that_is_killed_once_it_was_ready_starts_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "PAUSE_S", 0.01)
    lives = (
        f"import pathlib\nnumber = pathlib.Path({str(tmp_path / 'lives')!r})\nfirst = not"
        " number.exists()"
    )
    ends = (
        "number.write_text('')\nprint('\x1eready', flush=True)\nprint(f'\x1eended {137 if first"
        " else 3}', flush=True)"
    )
    assert await launch(place("a", lives, ends), place("b", FOREVER)) == 3
    err = capfd.readouterr().err
    assert err.count("a (machine 0 of 2): starting") == 2
    assert err.count("machine 0 is gone, and all requests with it; restarting it") == 1


async def test_who_cannot_take_part_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    why = "print('moeserve serve: no model here')"
    assert await launch(place("a", FOREVER, ended(0)), place("b", why, ended(3))) == 3
    assert "giving up: b cannot join: moeserve serve: no model here" in capfd.readouterr().err


async def test_restarts_are_bounded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "PAUSE_S", 0.01)
    assert await launch(place("a", FOREVER, ended(0)), place("b", ended(1)), max_restarts=2) == 1
    err = capfd.readouterr().err
    assert err.count("b (machine 1 of 2): starting") == 3
    assert "giving up: b ended 3 times within an hour; --max-restarts allows more" in err


async def test_a_second_signal_ends_all_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The first signal asks machine 0 to drain, which takes long here."""
    until_killed = (
        "import sys\nprint('\\x1edraining' if sys.stdin.read(2)[1] == 'd' else '', flush=True)\n"
    )
    until_killed += "while sys.stdin.read(1) != 'k': pass\n" + ended(137)
    running = asyncio.create_task(launch(place("a", until_killed), place("b", until_killed)))
    said = ""
    for number, state in ((signal.SIGTERM, "starting"), (signal.SIGINT, "draining")):
        async with asyncio.timeout(60):
            while f"a (machine 0 of 2): {state}" not in said:
                said += capfd.readouterr().err
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), number)
    assert await running == 128 + signal.SIGINT
    assert "a (machine 0 of 2): ended with code 137" in capfd.readouterr().err


async def test_a_silent_machine_is_lost(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays open but silent; a new one is made."""
    monkeypatch.setattr(machine, "PING_S", 0.02)
    monkeypatch.setattr(supervise, "PAUSE_S", 0.01)
    answers = "import sys\n" + "\n".join(
        "print('\\x1epong', flush=True) if sys.stdin.read(1) else None" for _ in range(40)
    )
    silent = place("b", "import time; time.sleep(60)")
    assert await launch(place("a", answers, ended(0)), silent, max_restarts=1000) == 0
    err = capfd.readouterr().err
    assert "b (machine 1 of 2): lost" in err
    assert "b (machine 1 of 2): restarting" in err


async def test_a_machine_that_joins_while_the_first_one_serves_is_ready_once_that_is_settled(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that returns very fast fails no probe, so machine 0 reports nothing about it."""
    monkeypatch.setattr(supervise, "SETTLED_S", 0.1)
    ready = "print('\\x1eready', flush=True)"
    joins = "print('\\x1ejoined', flush=True)"
    later = "import time; time.sleep(0.5)"
    running = asyncio.create_task(
        launch(place("a", ready, FOREVER, ended(0)), place("b", later, joins, FOREVER))
    )
    said = ""
    async with asyncio.timeout(60):
        while "b (machine 1 of 2): ready" not in said:
            said += capfd.readouterr().err
            await asyncio.sleep(0.01)
    assert said.index("a (machine 0 of 2): ready") < said.index("b (machine 1 of 2): joined")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_all_that_cannot_be_reached_are_named_at_once() -> None:
    began = time.monotonic()
    refused = "print('ssh: PartConnection refused')"
    with pytest.raises(
        ConfigError, match="cannot start on b: ssh: PartConnection refused; c: no output"
    ):
        await launch(
            place("a", FOREVER), place("b", refused, hello=False), place("c", "pass", hello=False)
        )
    assert time.monotonic() - began < 15
    with pytest.raises(ConfigError, match="cannot run /no/ssh: No such file"):
        await launch(LaunchTarget("a", ("/no/ssh",)))


async def test_noise_and_long_lines_hurt_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    """A shell's greeting comes before the hello; a line may be longer than any buffer."""
    noise = LaunchTarget(
        "a",
        (
            sys.executable,
            "-c",
            "print('welcome')\n" + HELLO + "print('x' * 3_000_000)\n" + ended(0),
        ),
    )
    assert await launch(noise) == 0
    assert "a (machine 0 of 1): ended with code 0" in capfd.readouterr().err
