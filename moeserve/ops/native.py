"""The compiled extension of moeserve (csrc/), if it was built."""

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

log = logging.getLogger(__name__)


@cache
def native() -> ModuleType | None:
    """Return the module `moeserve._native`, or None with a warning.

    Everything works without it, but slower.
    """
    try:
        return import_module("moeserve._native")
    except ImportError as error:
        log.warning(
            "the native extension is not available (%s), so slower code is used; reinstall "
            "moeserve with a C++20 compiler",
            error,
        )
        return None
