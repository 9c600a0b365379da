"""Changes of a fleet, without its processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moeserve.actor.actor import Inbox
from moeserve.cluster.scaling import Scaling
from moeserve.config import Config
from moeserve.errors import Conflict


def scaling_with(propose: Callable[..., Awaitable[None]]) -> Scaling:
    """Return the changes of a fleet that is complete, with this proposal of a placement."""
    fleet: Any = SimpleNamespace(
        ready=object(),
        groups=[SimpleNamespace(complete=True)],
        experts=SimpleNamespace(propose=propose),
    )
    return Scaling(fleet, Config(), Inbox("front end"), None, {})


async def test_rebalancing_that_a_stop_cuts_short_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposing = asyncio.Event()

    async def propose(*, force: bool) -> None:
        proposing.set()
        await asyncio.Event().wait()

    changes = scaling_with(propose)
    looking = asyncio.create_task(changes._rebalance_if_it_pays())
    await proposing.wait()
    with caplog.at_level(logging.INFO):
        await changes.stop()
        await looking
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "experts were not moved: the server is stopping")
    ]


async def test_a_change_waits_for_rebalancing_that_nobody_asked_for() -> None:
    release = asyncio.Event()
    proposals: list[bool] = []

    async def propose(*, force: bool) -> None:
        proposals.append(force)
        await release.wait()

    changes = scaling_with(propose)
    automatic = asyncio.create_task(changes._rebalance_if_it_pays())
    await asyncio.sleep(0)
    asked_for = asyncio.create_task(changes.rebalance())
    await asyncio.sleep(0)
    assert proposals == [False]
    release.set()
    assert await asked_for is None
    assert proposals == [False, True]
    await automatic
    await changes.stop()


async def test_a_change_that_waits_does_not_begin_when_the_server_stops() -> None:
    proposals: list[bool] = []

    async def propose(*, force: bool) -> None:
        proposals.append(force)
        await asyncio.Event().wait()

    changes = scaling_with(propose)
    automatic = asyncio.create_task(changes._rebalance_if_it_pays())
    await asyncio.sleep(0)
    asked_for = asyncio.create_task(changes.rebalance())
    await asyncio.sleep(0)
    await changes.stop()
    with pytest.raises(Conflict, match="the server is stopping"):
        await asked_for
    await automatic
    assert proposals == [False]


async def test_a_change_that_fails_by_a_bug_is_logged_though_its_caller_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = asyncio.Event()

    async def propose(*, force: bool) -> None:
        await release.wait()
        raise ZeroDivisionError("a bug")

    changes = scaling_with(propose)
    caller = asyncio.create_task(changes.rebalance())
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    with pytest.raises(Conflict, match="another change is in progress"):
        await changes.rebalance()
    release.set()
    while "ZeroDivisionError: a bug" not in caplog.text:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    with pytest.raises(ZeroDivisionError):
        await changes.rebalance()  # the next change may begin
    await changes.stop()
