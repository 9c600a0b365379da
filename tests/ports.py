"""Ports for processes that a test starts, which bind them some time later."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

# Below what kernels give to `bind(0)` and to clients (Linux: from 32768): a port that the kernel
# has named free may be given to another test before it is bound.
FIRST = 10_000
PORTS_PER_WORKER = 1_400
MAX_WORKERS = 16


def _numbers() -> Iterator[int]:
    """Yield those of this worker of pytest, every other one, again and again."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MAX_WORKERS
    begin = random.SystemRandom().randrange(0, PORTS_PER_WORKER, 2)  # another session may run
    while True:
        for number in range(0, PORTS_PER_WORKER, 2):
            yield FIRST + worker * PORTS_PER_WORKER + (begin + number) % PORTS_PER_WORKER


_candidates = _numbers()


def free_port() -> int:
    """Return a port on which nobody listens. Neither it nor the next one is returned again soon."""
    while True:
        port = next(_candidates)
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port
