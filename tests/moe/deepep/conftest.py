"""Ranks are threads here; OpenMP teams of several of them would fight for the cores."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None: ...
