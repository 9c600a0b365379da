"""The private directory of a running server, for its sockets."""

import fcntl
import os
import shutil
import tempfile

from moeserve.errors import ConfigError

_PREFIX = "moeserve-"
_LOCK = "lock"
_REMEDY = "; set TMPDIR to one that can be written"
# A socket path may have 107 bytes. The rest is for the names of this directory, epoch and socket.
_MAX_BASE_BYTES = 48


class RunDir:
    """A new directory with mode 0700.

    `close` removes it. If this server is killed, the next server removes it.
    """

    def __init__(self) -> None:
        base = _base()
        _sweep(base)
        what = f"cannot make a directory for sockets in {base}"
        with ConfigError.instead_of(OSError, what, _REMEDY):
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
            self._lock_fd = _lock(self.path)

    def close(self) -> None:
        """Remove the directory. May be called repeatedly."""
        if self._lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


def _base() -> str:
    """Return TMPDIR, or /tmp if a socket path in TMPDIR would be too long for the kernel."""
    what = "there is no directory for temporary files that can be written"
    with ConfigError.instead_of(OSError, what, _REMEDY):
        base = tempfile.gettempdir()
    return base if len(os.fsencode(base)) <= _MAX_BASE_BYTES else "/tmp"


def _lock(path: str) -> int:
    """Lock a directory, and return the file descriptor that holds the lock.

    The kernel releases the lock however this process ends. A process id would not be safe, because
    ids are reused.
    """
    # Rename the file only when it is locked, so that a sweep never sees it unlocked.
    unlocked = os.path.join(path, _LOCK + ".new")
    fd = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(unlocked, os.path.join(path, _LOCK))
    return fd


def _sweep(base: str) -> None:
    """Remove the directories of this user's killed servers: those whose lock is not held."""
    try:
        entries = [entry for entry in os.scandir(base) if entry.name.startswith(_PREFIX)]
    except OSError:
        return
    for entry in entries:
        try:
            if (
                not entry.is_dir(follow_symlinks=False)
                or entry.stat(follow_symlinks=False).st_uid != os.getuid()
            ):
                continue
            fd = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # no directory of a server, or another server has removed it
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except OSError:
            pass  # locked by a running server
        finally:
            os.close(fd)
