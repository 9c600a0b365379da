"""Run these tests with one thread, and one at a time.

Ranks are threads, whose OpenMP teams would fight for the cores, and only one may interpret.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from moeserve.moe.all2all.base import Inbound


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None: ...


@pytest.fixture(autouse=True)
def _one_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is None:
        return
    from tests.comm.host_memory import interpreting

    as_sent = Inbound.x

    def in_turn(inbound: Inbound) -> Any:
        if inbound.scales is None:
            return inbound.rows
        with interpreting():
            return as_sent.fget(inbound)

    monkeypatch.setattr(Inbound, "x", property(in_turn))
