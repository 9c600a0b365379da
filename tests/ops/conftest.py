"""Fixtures shared by tests of native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .isas import ISAS, MODULE


@pytest.fixture
def usual_native() -> Iterator[None]:
    """Restore the best instruction set and one thread after a test that changed them."""
    yield
    if ISAS:
        MODULE.use_isa(ISAS[-1])
        MODULE.set_threads([-1])
