"""A fork server without slow imports, for the engines of builders.py."""

import builders  # noqa: F401

from moeserve.cluster import engine_main, fork_server

if __name__ == "__main__":
    engine_main.import_ahead = lambda **_: None
    fork_server.main()
