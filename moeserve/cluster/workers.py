"""Where an engine's other tensor-parallel ranks come from: forks of it, if it is one itself, or a command."""

from __future__ import annotations

from pathlib import Path

from moeserve.actor.forked import Forked
from moeserve.actor.forking import fork_child
from moeserve.cluster import tp_worker

WORKER = "moeserve.cluster.tp_worker"

_forked: list[Forked] = []  # of this process; they wait to be told what they are


def fork(number: int) -> None:
    """Forks so many, while this process is still on one thread."""
    for _ in range(number):
        worker = fork_child()
        if worker is None:
            for sibling in _forked:
                sibling.forget()
            Path("/proc/self/comm").write_text("moeserve-worker", "ascii")
            tp_worker.main()
        else:
            _forked.append(worker)


def take_forked() -> list[Forked]:
    """Those that wait, for a `Team`; only once."""
    taken, _forked[:] = _forked[:], []
    return taken
