"""Start the first engine's process early, before the server's own imports.

The imports of the engine take longest at startup, and they need no settings. The process waits for
its `EngineOrder` meanwhile.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from moeserve.cluster.order import command_of
from moeserve.config import Config

ENGINE = "moeserve.cluster.engine_main"
_waiting: list[subprocess.Popen[bytes]] = []  # the process that waits for its order, if any


@contextmanager
def early_engine(config: Config) -> Iterator[None]:
    """Start an engine process for `take_early_process`, if the server will need exactly one.

    On exit, the process is killed if nobody took it.
    """
    parallel = config.parallel
    if parallel.num_ranks == 1 and not (parallel.standby or config.device.null_runner):
        pipe = subprocess.PIPE
        command = [*command_of(ENGINE), "ahead"]
        _waiting.append(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, bufsize=0)
        )
    try:
        yield
    finally:
        while (process := take_early_process()) is not None:
            with process:
                process.kill()


def take_early_process() -> subprocess.Popen[bytes] | None:
    """Return the process of `early_engine`, or None if there is none or it was taken already."""
    return _waiting.pop() if _waiting else None
