"""Reloads files while the server runs: when they change, and on SIGHUP."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moeserve.actor.tasks import cancel, every, log_error, spawn
from moeserve.errors import ConfigError

log = logging.getLogger(__name__)

CHECK_S = 2.0  # interval of checks for changed files

T = TypeVar("T")
Stamp = tuple[int, int, int]  # changes when a file is written or replaced


@dataclass(eq=False)
class _Watched:
    paths: Sequence[str]
    read: Callable[[], Any]
    use: Callable[[Any], None]
    stamps: list[Stamp | None] = field(default_factory=list)  # of the content in use
    error: str = ""  # error of the last attempt to read


class Reloads:
    """The watched files, and the functions that read and use them.

    A thread reads the files; their content is put to use on the event loop, all at once. Invalid
    content changes nothing, and is read again until it is valid.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._checking = asyncio.Lock()
        self._forced: set[asyncio.Task[None]] = set()

    def add(self, paths: Sequence[str], read: Callable[[], T], use: Callable[[T], None]) -> None:
        """Watch files: call `read` when one changes and on SIGHUP, and `use` with its result.

        Without paths, only SIGHUP counts. The current content counts as used. `read` runs in a
        thread and may raise ConfigError.
        """
        self._watched.append(_Watched(paths, read, use, [_stamp(path) for path in paths]))

    async def check(self, *, force: bool = False) -> None:
        """Reload changed files, or all files if `force`. Never raises."""
        async with self._checking:
            for watched in self._watched:
                try:
                    await self._check(watched, force=force)
                except Exception as error:
                    log_error("reloads", error)

    async def _check(self, watched: _Watched, *, force: bool) -> None:
        stamps = await asyncio.to_thread(lambda: [_stamp(path) for path in watched.paths])
        if not force and stamps == watched.stamps:
            return
        try:
            watched.use(await asyncio.to_thread(watched.read))
        except Exception as error:
            if force or str(error) != watched.error:  # once, not at every check
                log.error(
                    "not reloaded, the previous content stays in use: %s",
                    error,
                    exc_info=None if isinstance(error, ConfigError) else error,
                )
            watched.error = str(error)
        else:
            watched.stamps = stamps
            watched.error = ""
            log.info("reloaded %s", ", ".join(watched.paths) or "the access log")

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Check on a timer and on SIGHUP inside the block.

        Without watched files, SIGHUP ends the process, because there is no handler.
        """
        if not self._watched:
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._force)
        checks = every(CHECK_S, self.check, name="reloads")
        timer = spawn(checks, name="reloads", on_error=log_error)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            await cancel(timer, *self._forced)

    def _force(self) -> None:
        task = spawn(self.check(force=True), name="reload", on_error=log_error)
        self._forced.add(task)
        task.add_done_callback(self._forced.discard)


def _stamp(path: str) -> Stamp | None:
    """Return the time, size and inode of a file; None if there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
