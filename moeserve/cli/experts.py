"""`moeserve experts`: shows the load of a server's ranks by layer, in the terminal."""

import argparse
import asyncio
import sys

from moeserve.cli.connect import add_server_flags, client_from
from moeserve.protocol import ExpertStatus

SHADES = " ░▒▓█"
CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the server and of repetition."""
    add_server_flags(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between updates [1]"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print once and exit (default if the output is not a terminal)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the picture once, or repeatedly on a terminal."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    async with client_from(args) as client:
        if args.once or not sys.stdout.isatty():
            print(picture(await client.experts()))
            return 0
        async with await client.watch_experts(args.interval) as stream:
            async for shown in stream:
                print(CLEAR + picture(shown), flush=True)
    return 0


def picture(shown: ExpertStatus) -> str:
    """Return a line per rank with a character per layer, from blank (no load) to a full block
    (at least twice the layer's mean).
    """
    loads = rank_loads(shown)
    lines = [
        f"{len(shown.engines)} engines, epoch {shown.epoch}, placement {shown.placement.version}, "
        f"balance {shown.balance.ranks:.2f} (1: even), moved "
        f"{shown.rebalancing.moved_bytes / 1e6:.1f} MB",
        shown.rebalancing.why,
    ]
    for rank in range(len(loads[0]) if loads else 0):
        cells = "".join(SHADES[_shade(layer[rank], sum(layer) / len(layer))] for layer in loads)
        total = sum(map(sum, loads)) or 1
        share = sum(layer[rank] for layer in loads) / total
        lines.append(f"rank {rank:>3} {share:6.1%} |{cells}|")
    for engine in shown.engines:
        lines.append(
            f"engine {engine.engine}: {engine.state}, {engine.running} running, {engine.waiting} "
            "waiting, step "
            f"{1e3 * engine.mean_step_s:.1f} ms, overlap {engine.overlap_efficiency:.0%}, "
            f"{engine.restarts} restarts"
        )
    return "\n".join(lines)


def rank_loads(shown: ExpertStatus) -> list[list[float]]:
    """Return recent tokens by layer and rank. The tokens of an expert are split evenly among its
    physical experts.
    """
    per_rank = shown.placement.experts_per_rank
    loads = []
    for physical, recent in zip(shown.placement.experts, shown.load.recent, strict=True):
        tokens = [recent[expert] / physical.count(expert) for expert in physical]
        first_of_ranks = range(0, len(tokens), per_rank)
        loads.append([sum(tokens[first : first + per_rank]) for first in first_of_ranks])
    return loads


def _shade(load: float, mean: float) -> int:
    """Return an index in SHADES: 2 for the mean, 4 for twice the mean or more."""
    return min(len(SHADES) - 1, round(load / mean * 2)) if mean else 0
