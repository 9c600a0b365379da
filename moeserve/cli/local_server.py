"""A private server on a loopback port for the time of a `with` block: the offline side of run-batch.

The parent sends settings and a random key over stdin, so that neither shows in `ps`. The child ends with the parent,
however that ends (actor/guard.py).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec

from moeserve.actor.guard import adopt
from moeserve.actor.process import Child
from moeserve.cli.main import report
from moeserve.client import AsyncClient
from moeserve.config import Config
from moeserve.errors import ConfigError

STOP_WITHIN_S = 40.0


@asynccontextmanager
async def local_server(config: Config, start_timeout_s: float = 1800.0) -> AsyncIterator[AsyncClient]:
    """Yields a client of a new server with this config; address, port and keys are replaced by private ones.

    Raises ConfigError with the server's last log lines and its exit code if it does not start.
    """
    key, port = secrets.token_urlsafe(24), _free_port()
    server = replace(config.server, host="127.0.0.1", port=port, api_key=(key,), api_key_file=None, admin_key_file=None)
    document = msgspec.json.encode(replace(config, server=server))
    env = {name: value for name, value in os.environ.items() if not name.startswith("MOESERVE_")}
    command = (sys.executable, "-m", "moeserve.cli.local_server")
    child = Child.start("server", command, document, env=env, forward=lambda line: None)
    client = AsyncClient(f"http://127.0.0.1:{port}/v1", key)
    try:
        await _ready_or_dead(client, child, start_timeout_s)
        yield client
    finally:
        await client.close()
        await child.stop(STOP_WITHIN_S)


async def _ready_or_dead(client: AsyncClient, child: Child, timeout_s: float) -> None:
    ready, died = asyncio.create_task(client.wait_ready(timeout_s)), asyncio.create_task(child.death())
    try:
        await asyncio.wait({ready, died}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return await ready
        death = died.result()
        error = ConfigError(f"the server did not start: {death}")
        error.exit_code = max(1, death.exit_code)
        raise error
    finally:
        for task in (ready, died):
            task.cancel()
        await asyncio.gather(ready, died, return_exceptions=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    """The child process: serves the config that the parent writes to stdin."""
    config = msgspec.json.decode(adopt(), type=Config)
    os.setsid()  # a Ctrl-C in the terminal is for the parent, which stops this process
    from moeserve.server.run import serve

    try:
        return serve(config)
    except Exception as error:
        return report(error, "serve")


if __name__ == "__main__":
    sys.exit(main())
