"""Both event loops, for everything that uses file descriptors and processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Return run(coroutine), which runs it on a fresh loop of each kind with a limit of 20 s."""
    factory = None
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop

    def run_on_it(main: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(20):
                return await main

        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(limited())

    return run_on_it


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/s"
