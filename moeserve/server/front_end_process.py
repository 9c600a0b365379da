"""The process of a front end under `moeserve serve --standby`; standby.py starts two of them."""

import logging
import os
import signal
import socket
from queue import SimpleQueue

import msgspec

from moeserve.actor import guard
from moeserve.actor.process import to_stderr
from moeserve.cluster.logs import set_up_logging
from moeserve.errors import ConfigError, MoeserveError
from moeserve.server.standby import CRASH_EXIT_CODE, FrontEndOrder

log = logging.getLogger("moeserve.server.front_end_process")  # its __name__ is "__main__"


def main() -> None:
    """Run a front end: prepare, wait for its turn, serve."""
    turn: SimpleQueue[bytes] = SimpleQueue()
    order = msgspec.json.decode(guard.adopt(turn.put), type=FrontEndOrder)
    stdout, *fds = order.fds
    os.dup2(stdout, 1)
    os.setsid()  # Ctrl-C reaches the whole terminal; the root process decides
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it serves, and reads all files then
    set_up_logging(order.config.server.log_level, order.config.server.log_format)
    # The server's imports take a while. They come after setsid, so that Ctrl-C in the terminal does
    # not interrupt them.
    from moeserve.server.run import serve_in_turn

    try:
        sockets = [socket.socket(fileno=fd) for fd in fds]
        code = serve_in_turn(order.config, order.root, sockets, turn)
    except ConfigError as error:
        to_stderr(f"moeserve serve: {error}")
        code = error.exit_code
    except MoeserveError as error:
        to_stderr(f"moeserve serve: {error}")
        code = 1
    except Exception:
        log.exception("the front end failed")
        code = CRASH_EXIT_CODE
    guard.end_process(code)


if __name__ == "__main__":
    main()
