"""A fork server without the imports that take long: for engines of builders.py."""

import builders  # noqa: F401

from moeserve.cluster import fork_server

if __name__ == "__main__":
    fork_server.import_ahead = lambda: None
    fork_server.main()
