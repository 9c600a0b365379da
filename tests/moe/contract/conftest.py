"""Run these tests with one thread per rank.

Ranks are threads here, on CPUs; OpenMP teams of several of them would fight for the cores.
"""

from __future__ import annotations

import pytest

from tests.comm import fake_nccl


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None: ...


@pytest.fixture(autouse=True)
def nccl_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nccl.use(monkeypatch)
