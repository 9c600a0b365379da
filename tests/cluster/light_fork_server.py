"""A fork server without the imports that take long: for engines of builders.py."""

import builders  # noqa: F401

from moeserve.cluster import engine_main, fork_server

if __name__ == "__main__":
    engine_main.import_ahead = lambda: None
    fork_server.main()
