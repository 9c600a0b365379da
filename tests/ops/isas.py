"""The native module, if it serves here, and the instruction sets that tests run through by
`MODULE.use_isa`.
"""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.ops.native import native

MODULE: Any = native()
ISAS: list[str] = MODULE.supported_isas() if MODULE is not None else []
needs_native = pytest.mark.skipif(not ISAS, reason="no native kernels for this machine")
