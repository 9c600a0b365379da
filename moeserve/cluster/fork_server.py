"""The fork server: `python -m moeserve.cluster.fork_server FD`, started by `LocalHost` and by
nobody else.

Each of its forks first forks its tensor-parallel workers and then becomes an engine.
"""

import signal
import sys
from pathlib import Path

from moeserve.actor import guard
from moeserve.actor.forking import serve
from moeserve.cluster import engine_main, tp_worker


def main() -> None:
    """Run the server, and in each fork the engine."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole terminal; the front end decides
    guard.die_with_parent()
    engine_main.import_ahead()
    num_ranks = serve(int(sys.argv[1]))
    sys.argv[:] = [engine_main.__file__]
    Path("/proc/self/comm").write_text("moeserve-engine", "ascii")
    tp_worker.fork_workers(num_ranks - 1)
    engine_main.main()


if __name__ == "__main__":
    main()
