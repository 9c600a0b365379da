"""A lock between the processes that change a repository in the cache."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Lock a file inside the block, and yield True; yield False if another process has locked it.

    The lock of a killed process is free. On a file system without locks all processes get them:
    two that write the same file will find that its digest is wrong.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        yield True
