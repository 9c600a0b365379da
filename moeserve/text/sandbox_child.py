"""The child's side of a sandbox: its limits, and a loop that answers lines with lines."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable

LIMIT_EXIT = 81  # the exit code of a process that met its own limit of memory or of nesting


def set_limits(max_memory: int) -> None:
    """Limit the address space of this process. Ctrl-C is for the parent, which then closes our
    standard input.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(lines: Iterable[bytes], answer: Callable[[bytes], bytes], cpu_s: float) -> None:
    """Answer each line with a line until standard input ends. The first line of output is empty and
    says that the process is ready.

    A line that takes more than `cpu_s` seconds of CPU time ends the process by SIGPROF, which
    nobody catches. One that needs too much memory ends it with LIMIT_EXIT.
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
