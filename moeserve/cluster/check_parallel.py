"""Checks --dp, --tp and the settings of several machines against the model's config. Imports no
torch.
"""

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
    if parallel.node_rank:
        raise ConfigError(
            f"--node-rank {parallel.node_rank}: requests go to machine 0; here run `moeserve serve`"
        )
    _check_redundant(parallel, spec)


def check_machines(parallel: ParallelConfig) -> None:
    """Raise ConfigError if the settings of this machine cannot be those of one among several."""
    nnodes = parallel.nnodes
    if parallel.node_rank >= nnodes:
        raise ConfigError(
            f"--node-rank {parallel.node_rank} needs --nnodes {parallel.node_rank + 1} at least"
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
                f"{flag} {value}: there is one machine; give --nnodes, or leave it out"
            )
    if parallel.encrypt_rows and (nnodes == 1 or parallel.ep == "off"):
        raise ConfigError(
            "--encrypt-rows: no rows of tokens leave this machine; it needs --nnodes 2 or more"
            " and --ep on"
        )
    if parallel.dp < nnodes:
        raise ConfigError(
            f"--dp {parallel.dp}: --nnodes {nnodes} machines need an engine each, --dp {nnodes}"
            " at least"
        )
    if nnodes > 1:
        rendezvous_of(parallel)


def rendezvous_of(parallel: ParallelConfig) -> tuple[str, int]:
    """Return host and port; an IPv6 host is in brackets. Raises ConfigError."""
    host, _, port = str(parallel.rendezvous).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--rendezvous {parallel.rendezvous}: must be HOST:PORT with an address of machine 0,"
            " as in 10.0.0.1:29500"
        )
    return host, int(port)


def check_scale(config: Config, spec: ModelSpec, dp: int) -> None:
    """Raise ConfigError if another number of engines cannot work; see `check_parallel`."""
    _check_redundant(replace(config.parallel, dp=dp), spec)


def _check_redundant(parallel: ParallelConfig, spec: ModelSpec) -> None:
    redundant = parallel.redundant_experts
    experts = spec.num_experts
    ranks = parallel.num_ranks
    if not redundant:
        return
    if not experts:
        raise ConfigError(f"--redundant-experts {redundant}: {spec.architecture} has no experts")
    if parallel.ep == "off" or ranks == 1:
        raise ConfigError(
            f"--redundant-experts {redundant} needs experts sharded over several ranks (--dp,"
            " --tp, --ep on)"
        )
    most = experts * (ranks - 1)
    if redundant > most:
        raise ConfigError(
            f"--redundant-experts {redundant}: {experts} experts on {ranks} ranks have use for"
            f" {most} at most; "
            "each rank has all of them then"
        )
