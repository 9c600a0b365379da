"""The compiled extension of moeserve (csrc/), where it was built."""

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

log = logging.getLogger(__name__)


@cache
def native() -> ModuleType | None:
    """Return the module `moeserve._native`, or None after a warning. Everything works without it,
    slower.
    """
    try:
        return import_module("moeserve._native")
    except ImportError as error:
        log.warning(
            "native code is not available (%s): slower paths serve; reinstall "
            "moeserve with a C++20 compiler to get it",
            error,
        )
        return None
