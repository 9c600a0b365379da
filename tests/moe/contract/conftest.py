"""Ranks are threads here, on CPUs; OpenMP teams of several of them would fight for the cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.parallel import fake_nccl


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nccl_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nccl.use(monkeypatch)
