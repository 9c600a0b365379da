"""Changes to a fleet, apart from the fleet."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from moeserve.cluster import scaling
from moeserve.cluster.scaling import Scaling


async def test_rebalancing_that_a_stop_cuts_short_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scaling, "CHECK_S", 0.01)
    proposing = asyncio.Event()

    async def propose(*, force: bool) -> None:
        proposing.set()
        await asyncio.Event().wait()

    fleet: Any = SimpleNamespace(
        ready=object(),
        groups=[SimpleNamespace(complete=True)],
        experts=SimpleNamespace(propose=propose),
    )
    changes = Scaling(fleet)
    watching = asyncio.create_task(changes.watch())
    await proposing.wait()
    with caplog.at_level(logging.INFO):
        await changes.stop()
        fleet.ready = None
        await asyncio.sleep(0.03)
    watching.cancel()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "experts stay where they are: the server is stopping")
    ]
