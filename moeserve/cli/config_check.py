"""`moeserve config check FILE`: validates a --config file without starting anything."""

from __future__ import annotations

import argparse

from moeserve.cli.settings import resolve
from moeserve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds FILE, which may also be given as --config FILE."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="YAML file for --config")
    parser.add_argument("--config", metavar="FILE", help="the same")


def run(args: argparse.Namespace) -> int:
    """Prints how many settings the file has. Raises ConfigError for the first bad one."""
    if (args.file is None) == (args.config is None):
        raise ConfigError("name one file: moeserve config check FILE")
    args.config = args.config or args.file
    resolved = resolve(args, env={})
    print(f"{args.config}: ok, {len(resolved.origins)} settings")
    return 0
