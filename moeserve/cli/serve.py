"""`moeserve serve [MODEL]`: the server, on this machine or as one of several."""

import argparse
import os
import sys
from dataclasses import replace

from moeserve.cli.settings import ResolvedSettings, add_flags, resolve, unknown_variables
from moeserve.cluster.ahead import begun
from moeserve.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting."""
    add_flags(parser)
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.epilog = (
        "Every flag is also an environment variable (--max-model-len: MOESERVE_MAX_MODEL_LEN). "
        "Precedence: flag, variable, --config file, default (in [brackets]). More settings can be "
        "set in the --config file only; `moeserve config show` lists all. Numbers may be written "
        "as 25.6k (decimal) or 2GiB. Many flags of vLLM and SGLang are translated, with a note."
    )


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Return the exit code."""
    _use_stdout()
    resolved = resolve(args)
    for name in unknown_variables():
        _print(f"ignoring the unknown environment variable {name}")
    config = _placed(resolved)
    if config is None:
        return 0
    if config.parallel.node_rank:
        from moeserve.cluster.node import JOIN_S, LAUNCHED_JOIN_S, serve_node

        return serve_node(config, JOIN_S if config is resolved.config else LAUNCHED_JOIN_S)
    with begun(config):
        from moeserve.server.run import serve  # slow to import

        return serve(config)


def _use_stdout() -> None:
    """Open /dev/null as standard output if that is closed, so that no other file gets its
    descriptor.
    """
    if sys.stdout is None:
        fd = os.open(os.devnull, os.O_WRONLY)
        if fd != 1:
            os.dup2(fd, 1)
            os.close(fd)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115


def _placed(resolved: ResolvedSettings) -> Config | None:
    """Return the config of this machine, with the values of a launcher (Slurm, torchrun, ...).

    Print where they come from. Return None if another process of this machine serves.
    """
    from moeserve.cluster.allocation import apply, outside_of_step

    config = resolved.config
    given = {path.removeprefix("parallel.") for path in resolved.origins}
    parallel, found = apply(config.parallel, given, os.environ)
    if found is None:
        if "nnodes" not in given and (advice := outside_of_step(os.environ)):
            _print(advice)
        return config
    from moeserve.cluster.check_parallel import rendezvous_of
    from moeserve.cluster.default_key import default_key

    if found.local_rank:
        _print(
            f"{found.source}: local rank {found.local_rank} has nothing to do: local rank 0 starts "
            "this machine's part"
        )
        return None
    machine = f"machine {parallel.node_rank} of {parallel.nnodes}"
    _print(f"{found.source}: {machine}; machine 0 is at {parallel.rendezvous}")
    rendezvous_of(parallel)  # raises ConfigError before the wait for the secret
    if parallel.cluster_key_file is None:
        _print("machine 0 makes the machines' secret in its home; or set --cluster-key-file")
        parallel = replace(parallel, cluster_key_file=default_key(parallel.node_rank))
        _print(f"the machines' secret is in {parallel.cluster_key_file}")
    return replace(config, parallel=parallel)


def _print(text: str) -> None:
    print(f"moeserve serve: {text}", file=sys.stderr)
