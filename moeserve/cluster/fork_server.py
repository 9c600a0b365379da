"""The fork server: `python -m moeserve.cluster.fork_server FD`, started by `LocalHost` only.

Each fork first forks its tensor-parallel workers and then becomes an engine.
"""

import signal
import sys
from pathlib import Path

from moeserve.actor import guard
from moeserve.actor.forking import serve
from moeserve.cluster import engine_main, tp_worker


def main() -> None:
    """Run the server; in each fork, run an engine."""
    # Ctrl-C reaches all processes of the terminal, but the front end decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard.die_with_parent()
    engine_main.import_ahead(any_model=True)
    num_ranks = serve(int(sys.argv[1]))
    sys.argv[:] = [engine_main.__file__]
    Path("/proc/self/comm").write_text("moeserve-engine", "ascii")
    tp_worker.fork_workers(num_ranks - 1)
    engine_main.main()


if __name__ == "__main__":
    main()
