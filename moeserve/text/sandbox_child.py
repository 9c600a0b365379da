"""The child side of a sandbox process: its limits, and the loop of its line protocol."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable

LIMIT_EXIT = 81  # exit code of a process that reached its limit of memory or of recursion


def set_limits(max_memory: int) -> None:
    """Limit the address space of this process, and ignore Ctrl-C.

    On Ctrl-C the parent closes standard input, which ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(lines: Iterable[bytes], answer: Callable[[bytes], bytes], cpu_s: float) -> None:
    """Answer each line with a line until standard input ends.

    The first line of output is empty, and signals that the process is ready. A line that takes more
    than `cpu_s` seconds of CPU time ends the process by SIGPROF, which is not caught. One that
    needs too much memory ends it with LIMIT_EXIT.
    """
    out = sys.stdout.buffer
    out.write(b"\n")
    out.flush()
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            text = answer(line)
        except (MemoryError, RecursionError):
            os._exit(LIMIT_EXIT)
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(text + b"\n")
        out.flush()
