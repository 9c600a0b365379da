"""The private directory of a running server: sockets live there, nobody else can enter, nothing
stays behind.
"""

import fcntl
import os
import shutil
import tempfile

from moeserve.errors import ConfigError

_PREFIX = "moeserve-"
_LOCK = "lock"
_REMEDY = "; set TMPDIR to one that can be written"
_MAX_BASE_BYTES = (
    48  # leaves room for our name, an epoch's and a socket's within the 107 bytes of a socket path
)


class RunDir:
    """A fresh directory with mode 0700, removed by `close`, or by the next server if this one is
    killed.
    """

    def __init__(self) -> None:
        base = _base()
        _sweep(base)
        what = f"cannot make a directory for sockets in {base}"
        with ConfigError.instead_of(OSError, what, _REMEDY):
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
            self._lock_fd = _lock(self.path)

    def close(self) -> None:
        """Remove the directory. Safe to repeat."""
        if self._lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


def _base() -> str:
    """Return TMPDIR, or /tmp where a socket path in TMPDIR would be too long for the kernel."""
    what = "there is no directory for temporary files that can be written"
    with ConfigError.instead_of(OSError, what, _REMEDY):
        base = tempfile.gettempdir()
    return base if len(os.fsencode(base)) <= _MAX_BASE_BYTES else "/tmp"


def _lock(path: str) -> int:
    """Take a lock that the kernel releases however this process ends. (A process id may be
    reused.)
    """
    unseen = os.path.join(path, _LOCK + ".new")  # a sweep must never see the file without its lock
    fd = os.open(unseen, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(unseen, os.path.join(path, _LOCK))
    return fd


def _sweep(base: str) -> None:
    """Remove what killed servers of this user left. A directory whose lock is held is in use."""
    try:
        entries = [e for e in os.scandir(base) if e.name.startswith(_PREFIX)]
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
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except OSError:
            pass  # alive
        finally:
            os.close(fd)
