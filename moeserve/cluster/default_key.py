"""The cluster's secret where no --cluster-key-file is given: a file in the user's home, if the
machines share that.
"""

import os
import secrets
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from moeserve.errors import ConfigError

WAIT_S = 60.0
AGAIN_S = 0.1


def default_key(node_rank: int, *, wait_s: float = WAIT_S) -> str:
    """Return the file's path: machine 0 makes it where there is none, and others wait for it.
    Raises ConfigError."""
    # RuntimeError: there is no home
    what = "cannot keep a secret in the home"
    kinds = (OSError, RuntimeError)
    with ConfigError.instead_of(kinds, what, "; give --cluster-key-file"):
        path = (
            Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
            / "moeserve"
            / "cluster.key"
        )
        if node_rank == 0:
            _make(path)
        deadline_s = time.monotonic() + wait_s
        while not path.exists():
            if time.monotonic() >= deadline_s:
                raise ConfigError(
                    f"{path} did not come: machine 0 makes it, but the machines seem to share no"
                    " home; "
                    "give all of them a copy of one secret by --cluster-key-file"
                )
            time.sleep(AGAIN_S)
    return str(path)


def _make(path: Path) -> None:
    """Make the file unless there is one. It appears with its content, for readers on other
    machines.
    """
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(dir=path.parent)  # mode 600
    try:
        with os.fdopen(handle, "w") as out:
            out.write(secrets.token_urlsafe(32) + "\n")
        with suppress(FileExistsError):  # another job was first
            os.link(made, path)
    finally:
        os.unlink(made)
