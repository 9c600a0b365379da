"""Run ranks of one epoch as threads of this process, or as processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from moeserve.comm.members import Members
from moeserve.errors import PeerLost
from tests.ports import free_port

T = TypeVar("T")


def members_of(
    size: int, directory: str = "", *, epoch: int = 1, tp_size: int = 1, deadline_s: float = 20.0
) -> list[Members]:
    """Return each rank's Members for one epoch on this machine."""
    store = f"127.0.0.1:{free_port()}"
    return [
        Members(
            epoch=epoch,
            rank=rank,
            tp_size=tp_size,
            host_of=("here",) * size,
            directory=directory,
            store=store,
            token="secret",
            deadline_s=deadline_s,
        )
        for rank in range(size)
    ]


def together(calls: Sequence[Callable[[], T]], timeout_s: float = 100.0) -> list[T]:
    """Run the calls at the same time, one thread each, and return their results.

    Raises the first error; a rank's own error comes before PeerLost.
    """
    results: list[T | None] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeerLost))
    return results  # type: ignore[return-value]
