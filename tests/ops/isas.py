"""The native module, if it works here, and the instruction sets for `MODULE.use_isa` in tests."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.ops.native import native

MODULE: Any = native()
ISAS: list[str] = MODULE.supported_isas() if MODULE is not None else []
needs_native = pytest.mark.skipif(not ISAS, reason="no native kernels for this machine")
