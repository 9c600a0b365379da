"""The default of --cluster-key-file: a secret in the user's home, if the machines share it."""

import os
import secrets
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from moeserve.errors import ConfigError

WAIT_S = 60.0  # for machine 0 to create the file
RETRY_PAUSE_S = 0.1


def default_key(node_rank: int, *, wait_s: float = WAIT_S) -> str:
    """Return the path of the secret.

    Machine 0 creates the file if it does not exist, and the others wait for it. Raises ConfigError.
    """
    what = "cannot keep a secret in the home"
    errors = (OSError, RuntimeError)  # RuntimeError: the user has no home
    with ConfigError.instead_of(errors, what, "; give --cluster-key-file"):
        config_home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        path = config_home / "moeserve" / "cluster.key"
        if node_rank == 0:
            _make(path)
        deadline_s = time.monotonic() + wait_s
        while not path.exists():
            if time.monotonic() >= deadline_s:
                raise ConfigError(
                    f"{path} did not appear within {wait_s:g} s: machine 0 creates it, but the"
                    " machines seem to share no home; give all of them a copy of one secret with"
                    " --cluster-key-file"
                )
            time.sleep(RETRY_PAUSE_S)
    return str(path)


def _make(path: Path) -> None:
    """Create the file unless it exists.

    It gets its name only when it has its content, so that other machines never read an empty file.
    """
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, temporary_path = tempfile.mkstemp(dir=path.parent)  # mode 600
    try:
        with os.fdopen(fd, "w") as out:
            out.write(secrets.token_urlsafe(32) + "\n")
        with suppress(FileExistsError):  # another job created it first
            os.link(temporary_path, path)
    finally:
        os.unlink(temporary_path)
