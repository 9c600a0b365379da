"""`moeserve config check FILE`: is this --config file right?"""

from __future__ import annotations

import argparse

from moeserve.cli.settings import settle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="FILE", help="YAML file for --config")


def run(args: argparse.Namespace) -> int:
    settled = settle(args, env={})
    print(f"{args.config}: ok, {len(settled.origins)} settings")
    return 0
