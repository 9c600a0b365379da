"""Files that are read again while the server runs: when they change, and on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeserve.errors import ConfigError

log = logging.getLogger(__name__)

CHECK_S = 2.0  # between two looks at the files


@dataclass
class _Watched:
    paths: Sequence[str]
    read: Callable[[], None]
    seen: list[tuple[int, int, int] | None]


class Reloads:
    """What to read again, and how its files looked last. A file that is bad leaves the old state in force."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []

    def add(self, paths: Sequence[str], read: Callable[[], None]) -> None:
        """Calls `read`, which may raise ConfigError, on SIGHUP and whenever one of these files has changed."""
        self._watched.append(_Watched(paths, read, _stamps(paths)))

    def check(self, *, force: bool = False) -> None:
        """Reads what has changed, or everything if `force`."""
        for watched in self._watched:
            seen = _stamps(watched.paths)
            if not force and seen == watched.seen:
                continue
            watched.seen = seen
            try:
                watched.read()
            except ConfigError as error:
                log.error("not reloaded, the old state stays in force: %s", error)
            else:
                log.info("reloaded %s", ", ".join(watched.paths) or "the access log")

    async def run(self) -> None:
        """Looks at the files on a timer and on SIGHUP until cancelled. Without any file SIGHUP ends the process."""
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


def _stamps(paths: Sequence[str]) -> list[tuple[int, int, int] | None]:
    """Returns what changes when a file is written or replaced; None for one that is not there."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return found
