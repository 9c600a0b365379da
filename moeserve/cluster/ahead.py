"""The first engine's process, begun before the server is imported: its own imports take longest,
and need no order.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from moeserve.cluster.order import command_of
from moeserve.config import Config

ENGINE = "moeserve.cluster.engine_main"
_begun: list[subprocess.Popen[bytes]] = []  # and waits for its order


@contextmanager
def begun(config: Config) -> Iterator[None]:
    """Begin an engine's process for `take`, if this process will start one on its own.

    It ends if it was not taken.
    """
    parallel = config.parallel
    if parallel.num_ranks == 1 and not (parallel.standby or config.device.null_runner):
        pipe = subprocess.PIPE
        command = [*command_of(ENGINE), "ahead"]
        _begun.append(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, bufsize=0)
        )
    try:
        yield
    finally:
        while (process := take()) is not None:
            with process:
                process.kill()


def take() -> subprocess.Popen[bytes] | None:
    """Return the process that has begun, once."""
    return _begun.pop() if _begun else None
