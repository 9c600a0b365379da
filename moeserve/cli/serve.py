"""`moeserve serve [MODEL]`: the server, on this machine or as one of several."""

from __future__ import annotations

import argparse
import sys

from moeserve.cli.settings import add_flags, resolve, unknown_variables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting."""
    add_flags(parser)
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.epilog = (
        "Each flag has a MOESERVE_ variable (--max-model-len: MOESERVE_MAX_MODEL_LEN). A flag wins over the variable, "
        "that over --config, that over the default in [brackets]. Numbers may be written 25.6k (decimal) or 2GiB. "
        "Flags of vLLM and SGLang are taken too, each with a note that says what it became, or refused with ours."
    )


def run(args: argparse.Namespace) -> int:
    """Serves until it is stopped. Returns the exit code."""
    resolved = resolve(args)
    for name in unknown_variables():
        print(f"moeserve serve: ignoring the unknown environment variable {name}", file=sys.stderr)
    if resolved.config.parallel.node_rank:
        from moeserve.cluster.node import serve_node

        return serve_node(resolved.config)
    from moeserve.server.run import serve

    return serve(resolved.config)
