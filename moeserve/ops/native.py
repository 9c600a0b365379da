"""The compiled part of moeserve (csrc/), where there is one."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

log = logging.getLogger(__name__)


@cache
def native() -> ModuleType | None:
    """The module `moeserve._native`, or None; says so once in the log. Nothing needs it, some parts are faster."""
    try:
        return import_module("moeserve._native")
    except ImportError as error:
        log.warning(
            "native code is not available (%s): slower paths serve; reinstall moeserve with a C++20 compiler to get it",
            error,
        )
        return None
