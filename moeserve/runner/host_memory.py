"""The memory of this machine that a rank may use: physical memory, or what control groups leave."""

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil

from moeserve.actor.control_groups import (
    MEMBERSHIP,
    ROOT,
    control_groups,
    limit_of,
    number,
    read,
)
from moeserve.runner.limits import MemoryFacts

# Ranks by their command line, and by their name if they were forked (cluster/fork_server.py).
_RANK_MODULES = ("moeserve.cluster.engine_main", "moeserve.cluster.tp_worker")
_RANK_NAMES = ("moeserve-engine", "moeserve-worker")


def host_memory(cgroups: Path = ROOT, membership: Path = MEMBERSHIP) -> MemoryFacts:
    """Return the memory of this process: physical memory, or less if a control group (version 1 or
    2) limits it, or a group that contains that one.
    """
    host = psutil.virtual_memory()
    limit = host.total
    free = host.available
    for folder, is_v2 in control_groups(cgroups, membership, "memory"):
        group_limit = limit_of(folder, is_v2)
        used = number(read(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes")))
        if group_limit is not None and used is not None:
            # The page cache does not count as used. Its inactive and active files are both
            # subtracted, because pages that several processes have mapped in turn are active.
            stat = folder / "memory.stat"
            prefix = "" if is_v2 else "total_"
            cached = _stat(stat, prefix + "inactive_file") + _stat(stat, prefix + "active_file")
            limit = min(limit, group_limit)
            free = min(free, max(0, group_limit - max(0, used - cached)))
    memory = psutil.Process().memory_info()
    # Shared pages are those of libraries and of mapped files, which may be dropped.
    return MemoryFacts(limit=limit, used=memory.rss - getattr(memory, "shared", 0), free=free)


def trim_heap() -> None:
    """Give memory that this process has freed back to the system, if the C library can do so.

    glibc keeps tens of MiB in each arena after weights were packed.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def share_of_host(memory: MemoryFacts, num_ranks: int) -> MemoryFacts:
    """Return the memory of one of several ranks of this server on this host.

    Ranks start one after the other, and may be restarted. So the free memory and the memory that
    ranks hold already are divided, and what this rank holds is subtracted from its part.
    """
    if num_ranks == 1:
        return memory
    own = _private_bytes(psutil.Process())
    held = own + sum(map(_private_bytes, _other_ranks()))
    fair = max(0, (memory.free + held) // num_ranks - own)
    return MemoryFacts(memory.limit // num_ranks, memory.used, min(memory.free, fair))


def _stat(path: Path, key: str) -> int:
    for line in read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return number(value) or 0
    return 0


def _other_ranks() -> list[psutil.Process]:
    """Return the other ranks of this server on this host, as far as they run.

    Engines are children of the server (or of a node's process), and further tensor-parallel ranks
    are children of their engine.
    """
    process = psutil.Process()
    server = process.parent()
    if server is not None and _is_rank(server):  # this is a tensor-parallel worker
        server = server.parent()
    try:
        relatives = [] if server is None else server.children(recursive=True)
    except psutil.Error:  # the server has ended, and with it all ranks
        return []
    return [other for other in relatives if other.pid != process.pid and _is_rank(other)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
        return process.name() in _RANK_NAMES or any(
            module in word for module in _RANK_MODULES for word in words
        )
    except psutil.Error:  # it has ended
        return False


def _private_bytes(process: psutil.Process) -> int:
    """Return the bytes that would be free if the process ended, without pages of files."""
    text = read(Path(f"/proc/{process.pid}/smaps_rollup"))
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "Pss_Anon":
            return int(value.split()[0]) << 10
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0
    return int(memory.rss - getattr(memory, "shared", 0))
