"""Command lines of moeserve's own processes."""

from __future__ import annotations

import os
import sys

import moeserve


def command_of(module: str) -> list[str]:
    """Returns the command that runs `module` with this interpreter."""
    # -P: a file torch.py in the user's folder must not become the engine's torch. From a bare checkout, though,
    # the folder is where moeserve itself is.
    root = os.path.dirname(os.path.dirname(os.path.abspath(moeserve.__file__)))
    safe = [] if root == os.getcwd() else ["-P"]
    return [sys.executable, *safe, "-m", module]
