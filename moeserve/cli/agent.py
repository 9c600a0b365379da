"""`moeserve agent`: prints what connects a program to a running server, or starts the program."""

import argparse
import asyncio
import os
import shutil
import sys
from difflib import get_close_matches
from pathlib import Path

from moeserve.cli.agent_setup import (
    Agent,
    Server,
    Setup,
    agent_table,
    directory_of,
    set_up,
    shell_lines,
    write_files,
)
from moeserve.cli.connect import add_server_flags, client_from, key_from
from moeserve.errors import ConfigError

# Some programs look for `localhost` at its IPv6 address, at which the server does not listen.
DEFAULT_URL = "http://127.0.0.1:8000"
NO_KEY = "none"  # for a server without keys; most programs insist on a key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's name, the flags of the server and --run."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the program; without it: a list")
    add_server_flags(parser, DEFAULT_URL)
    parser.add_argument("--model", metavar="NAME", help="model name (default: the server's first)")
    parser.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="start the program; everything after --run is for the program",
    )


def run(args: argparse.Namespace) -> int:
    """List the programs, or print the lines for one, or become it."""
    if args.name is None:
        if args.run is not None:
            raise ConfigError("--run needs the name of a program; `moeserve agent` lists them")
        print(overview())
        return 0
    agent = _agent(args.name)
    server = asyncio.run(_server(args))
    if server.context < agent.needs:
        print(
            f"moeserve agent: {agent.title} needs a context of {agent.needs:,} tokens or more, and "
            f"{server.model} has {server.context:,}",
            file=sys.stderr,
        )
    directory = directory_of(args.name)
    setup = set_up(agent, server, directory)
    if args.run is None:
        print(shell_lines(agent, setup, directory))
    else:
        _start(agent, setup, directory, args.run)
    return 0


def overview() -> str:
    """Return a list of the programs."""
    lines = [
        "usage: moeserve agent NAME [--url URL] [--api-key KEY] [--model NAME] [--run ARGS]",
        "",
    ]
    for name, agent in agent_table().items():
        lines.append(f"  {name:<18} {agent.title}")
    return "\n".join(lines)


def _agent(name: str) -> Agent:
    table = agent_table()
    if name not in table:
        similar = get_close_matches(name, table, 1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        raise ConfigError(f"unknown program {name!r}; {hint}known are {', '.join(table)}")
    return table[name]


async def _server(args: argparse.Namespace) -> Server:
    """Ask the server for its model."""
    async with client_from(args, max_retries=0) as client:
        cards = {card.id: card for card in (await client.models.list()).data}
    if not cards:
        raise ConfigError("the server lists no models; is it still loading?")
    name = args.model or next(iter(cards))
    if name not in cards:
        raise ConfigError(f"--model: the server has no {name!r}, only {', '.join(cards)}")
    context = cards[name].max_model_len
    if context is None:
        raise ConfigError(f"the server does not tell the context length of {name}")
    root = args.base_url.rstrip("/").removesuffix("/v1").rstrip("/")
    return Server(root, key_from(args) or NO_KEY, name, context)


def _start(agent: Agent, setup: Setup, directory: Path, words: list[str]) -> None:
    """Replace this process by the program."""
    if not agent.command:
        raise ConfigError(f"{agent.title} cannot be started here; leave out --run")
    command = shutil.which(agent.command)
    if command is None:
        raise ConfigError(f"there is no {agent.command} on the PATH; `{agent.install}` installs it")
    with ConfigError.instead_of(OSError, directory):
        write_files(setup, directory)
    sys.stdout.flush()
    with ConfigError.instead_of(OSError, command):
        os.execve(command, [agent.command, *setup.args, *words], os.environ | setup.env)
