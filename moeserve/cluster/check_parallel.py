"""Check --dp, --tp and the multi-machine settings against the model, without importing torch."""

from dataclasses import replace

from moeserve.config import Config, ParallelConfig
from moeserve.errors import ConfigError
from moeserve.models.spec import ModelSpec
from moeserve.moe.all2all.registry import check_name
from moeserve.moe.experts.registry import check_kernels
from moeserve.runner.devices import check_device


def check_parallel(config: Config, spec: ModelSpec) -> None:
    """Raise ConfigError, with the remedy, if this model cannot be served with these settings."""
    parallel = config.parallel
    check_device(config.device.device)
    check_kernels(config.device.kernels)
    check_name(parallel.all2all)
    spec.check_tp(parallel.tp)
    check_machines(parallel)
    if parallel.node_rank:  # `moeserve serve` runs an agent then, and does not get here
        raise ConfigError(
            f"--node-rank {parallel.node_rank}: requests go to machine 0; here run `moeserve serve`"
        )
    _check_redundant(parallel, spec)


def check_machines(parallel: ParallelConfig) -> None:
    """Raise ConfigError if --nnodes, --node-rank and the settings that belong to them conflict."""
    nnodes = parallel.nnodes
    if parallel.node_rank >= nnodes:
        raise ConfigError(
            f"--node-rank {parallel.node_rank} needs at least --nnodes {parallel.node_rank + 1}"
        )
    for name in ("rendezvous", "cluster_key_file"):
        flag = f"--{name.replace('_', '-')}"
        value = getattr(parallel, name)
        if nnodes > 1 and not value:
            raise ConfigError(
                f"--nnodes {nnodes} needs {flag}, the same on all machines; see docs/multi-node.md"
            )
        if nnodes == 1 and value:
            raise ConfigError(
                f"{flag} {value}: there is only one machine; give --nnodes, or omit {flag}"
            )
    if parallel.encrypt_rows and (nnodes == 1 or parallel.ep == "off"):
        raise ConfigError(
            "--encrypt-rows: no activations leave this machine; it needs --nnodes 2 or more and"
            " --ep on"
        )
    if parallel.dp < nnodes:
        raise ConfigError(
            f"--dp {parallel.dp}: each of the {nnodes} machines (--nnodes) needs an engine; give at"
            f" least --dp {nnodes}"
        )
    if nnodes > 1:
        rendezvous_of(parallel)


def rendezvous_of(parallel: ParallelConfig) -> tuple[str, int]:
    """Split --rendezvous into host and port; an IPv6 host is in brackets. Raises ConfigError."""
    host, _, port = str(parallel.rendezvous).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--rendezvous {parallel.rendezvous}: must be HOST:PORT with an address of machine 0,"
            " for example 10.0.0.1:29500"
        )
    return host, int(port)


def check_scale(config: Config, spec: ModelSpec, dp: int) -> None:
    """Raise ConfigError if the fleet cannot be scaled to `dp` engines."""
    _check_redundant(replace(config.parallel, dp=dp), spec)


def _check_redundant(parallel: ParallelConfig, spec: ModelSpec) -> None:
    redundant = parallel.redundant_experts
    num_experts = spec.num_experts
    num_ranks = parallel.num_ranks
    if not redundant:
        return
    if not num_experts:
        raise ConfigError(f"--redundant-experts {redundant}: {spec.architecture} has no experts")
    if parallel.ep == "off" or num_ranks == 1:
        raise ConfigError(
            f"--redundant-experts {redundant} needs experts sharded over several ranks (--dp,"
            " --tp, --ep on)"
        )
    max_redundant = num_experts * (num_ranks - 1)
    if redundant > max_redundant:
        raise ConfigError(
            f"--redundant-experts {redundant}: at most {max_redundant} are of use for"
            f" {num_experts} experts on {num_ranks} ranks, because then each rank has all of them"
        )
