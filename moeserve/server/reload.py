"""Files that are read again while the server runs: when they change, and on SIGHUP."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence

from moeserve.errors import ConfigError

log = logging.getLogger(__name__)

CHECK_S = 2.0  # between two looks at the files


class Reloads:
    """What to read again, and how its files looked last. A file that is bad leaves the old state in
    force.
    """

    def __init__(self) -> None:
        self._watched: dict[Callable[[], None], tuple[Sequence[str], list[object]]] = {}

    def add(self, paths: Sequence[str], read: Callable[[], None]) -> None:
        """Calls `read`, which may raise ConfigError, on SIGHUP and whenever one of these files has
        changed.
        """
        self._watched[read] = paths, [_stamp(path) for path in paths]

    def check(self, *, force: bool = False) -> None:
        """Reads what has changed, or everything if `force`."""
        for read, (paths, seen) in list(self._watched.items()):
            self.add(paths, read)
            if not force and self._watched[read] == (paths, seen):
                continue
            try:
                read()
            except ConfigError as error:
                log.error("not reloaded, the old state stays in force: %s", error)
            else:
                log.info("reloaded %s", ", ".join(paths) or "the access log")

    async def run(self) -> None:
        """Looks at the files on a timer and on SIGHUP until cancelled. Without any file SIGHUP ends
        the process.
        """
        if not self._watched:
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: self.check(force=True))
        try:
            while True:
                await asyncio.sleep(CHECK_S)
                self.check()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Returns what changes when a file is written or replaced; None for one that is not there."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
