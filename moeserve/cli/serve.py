"""`moeserve serve [MODEL]`: the server, on this machine or as one of several."""

import argparse
import os
import sys
from dataclasses import replace
from typing import NamedTuple

from moeserve.cli.settings import ResolvedSettings, add_flags, resolve, unknown_variables
from moeserve.cluster.ahead import early_engine
from moeserve.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting."""
    add_flags(parser)
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.epilog = (
        "Every flag is also an environment variable (--max-model-len: MOESERVE_MAX_MODEL_LEN). "
        "Precedence: flag, variable, --config file, default (in [brackets]). More settings can be "
        "set in the --config file only; `moeserve config show` lists all. Numbers may be written "
        "as 25.6k (decimal) or 2GiB. Flags of vLLM, SGLang and llama.cpp are translated, with a "
        "note."
    )


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Return the exit code."""
    _keep_stdout_open()
    resolved = resolve(args)
    for name in unknown_variables():
        _print(f"ignoring the unknown environment variable {name}")
    machine = _this_machine(resolved)
    if machine.is_idle:
        return 0
    config = machine.config
    if config.parallel.node_rank:
        from moeserve.cluster.node import JOIN_S, LAUNCHED_JOIN_S, serve_node

        return serve_node(config, LAUNCHED_JOIN_S if machine.was_launched else JOIN_S)
    with early_engine(config):  # an engine process imports while the server does
        from moeserve.server.run import serve  # slow to import

        return serve(config)


def _keep_stdout_open() -> None:
    """Open /dev/null as standard output if that is closed, so that no other file gets its
    descriptor.
    """
    if sys.stdout is None:
        fd = os.open(os.devnull, os.O_WRONLY)
        if fd != 1:
            os.dup2(fd, 1)
            os.close(fd)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115


class _Machine(NamedTuple):
    """What this process has to do on its machine."""

    config: Config
    was_launched: bool = False  # by Slurm, torchrun, ..., whose variables are in `config`
    is_idle: bool = False  # another process of this machine serves


def _this_machine(resolved: ResolvedSettings) -> _Machine:
    """Complete the settings from a launcher's variables, and print where they come from."""
    from moeserve.cluster import allocation

    config = resolved.config
    given_names = {path.removeprefix("parallel.") for path in resolved.origins}
    parallel, allocated = allocation.complete_settings(config.parallel, given_names, os.environ)
    if allocated is None:
        if "nnodes" not in given_names and (warning := allocation.slurm_step_warning(os.environ)):
            _print(warning)
        return _Machine(config)
    from moeserve.cluster.check_parallel import rendezvous_of
    from moeserve.cluster.default_key import default_key

    if allocated.local_rank:
        _print(
            f"{allocated.source}: local rank {allocated.local_rank} has nothing to do: "
            "local rank 0 starts this machine's part"
        )
        return _Machine(config, was_launched=True, is_idle=True)
    machine = f"machine {parallel.node_rank} of {parallel.nnodes}"
    _print(f"{allocated.source}: {machine}; machine 0 is at {parallel.rendezvous}")
    rendezvous_of(parallel)  # raises ConfigError before the wait for the secret
    if parallel.cluster_key_file is None:
        _print(
            "machine 0 creates the machines' secret in its home directory; --cluster-key-file sets "
            "another file"
        )
        parallel = replace(parallel, cluster_key_file=default_key(parallel.node_rank))
        _print(f"the machines' secret is in {parallel.cluster_key_file}")
    return _Machine(replace(config, parallel=parallel), was_launched=True)


def _print(text: str) -> None:
    print(f"moeserve serve: {text}", file=sys.stderr)
