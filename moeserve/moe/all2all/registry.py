"""The all-to-all backends by name. Packages add theirs with the entry point "moeserve.all2all".

An entry is a callable that takes `BackendFacts` and returns an `All2All`, or raises `Unavailable`
with the reason why it is unavailable here. `auto` considers built-in backends only, so a plugin's
backend must be chosen by name. This module does not import torch, because settings are checked
without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.config import COMM_SMS, ParallelConfig
from moeserve.errors import ConfigError
from moeserve.plugins import Registry

if TYPE_CHECKING:
    import torch

    from moeserve.moe.all2all.base import All2All
    from moeserve.moe.all2all.wire_format import WireFormat

# To add a backend, write one file and enter it here.
BACKENDS: "Registry[Callable[[BackendFacts], All2All]]" = Registry(
    "moeserve.all2all",
    {
        "local": "moeserve.moe.all2all.local:make",
        "shm": "moeserve.moe.all2all.shm:make",
        "deepep_v2": "moeserve.moe.all2all.deepep:make_v2",
        "deepep_ll": "moeserve.moe.all2all.deepep:make_ll",
        "cuda_ipc": "moeserve.moe.all2all.cuda_ipc:make",
        "torch": "moeserve.moe.all2all.torch_a2a:make",
    },
    reserved=("auto",),
)
# The backends that `auto` considers on each device, best first.
AUTO = {"cpu": ("shm", "torch"), "cuda": ("deepep_v2", "deepep_ll", "cuda_ipc", "torch")}

# The memory for the rows that one dispatch may bring to a rank, on CPUs. In the worst case, every
# token of every rank has all its experts on one rank. A step that could need more memory is
# dispatched in rounds. The number of rows does not depend on the number of ranks; the number of
# tokens of a round does.
ROUND_BYTES = 128 << 20
# On GPUs, ROUND_BYTES times this: each round reads all experts' weights, and there is more memory.
GPU_ROUND_FACTOR = 4
# Narrow rows would fill ROUND_BYTES only in much larger steps than occur. So the number of rows is
# also limited to the rows that this many ranks send in their largest steps.
USUAL_RANKS = 8

REMOVED = {"allgather": "torch", "deepep_ht": "deepep_v2"}  # name -> successor


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """The facts for which a backend is made. They never change."""

    hidden_size: int
    dtype: "torch.dtype"
    top_k: int
    max_tokens: int  # the most tokens of a step on one rank
    experts_per_rank: int
    num_ranks: int  # over which the experts are sharded
    num_hosts: int = 1
    device: str = "cpu"
    comm_sms: int = COMM_SMS  # multiprocessors for moving rows
    is_comm_sms_set: bool = False  # whether the user set comm_sms
    encrypt_rows: bool = False
    wire: "WireFormat"

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in the model's dtype, before encoding."""
        return self.hidden_size * self.dtype.itemsize

    @property
    def planned_rows(self) -> int:
        """The most rows that one dispatch may bring to a rank."""
        return most_rows(self.max_tokens, self.top_k, self.row_bytes, self.device)

    def round_tokens(self, num_ranks: int) -> int:
        """Return how many tokens each of num_ranks ranks may dispatch at once, at least 1."""
        return max(1, min(self.max_tokens, self.planned_rows // (num_ranks * self.top_k)))


def most_rows(max_tokens: int, top_k: int, row_bytes: int, device: str) -> int:
    """Return the most rows that one dispatch may bring to a rank.

    max_tokens: of one step on one rank. row_bytes: before encoding.
    """
    budget = ROUND_BYTES if device == "cpu" else GPU_ROUND_FACTOR * ROUND_BYTES
    return max(top_k, min(budget // row_bytes, USUAL_RANKS * max_tokens * top_k))


class Unavailable(Exception):
    """A backend is unavailable here. The message says why, and what to change."""


def check_name(name: str) -> None:
    """Raise ConfigError for a backend that does not exist, or no longer exists."""
    if name in REMOVED:
        raise ConfigError(
            f"the all2all backend {name!r} was removed; use {REMOVED[name]!r}, or auto"
        )
    BACKENDS.check(name, "all2all", ("auto", *BACKENDS.built_in))


def make_backends(
    config: ParallelConfig,
    *,
    hidden_size: int,
    dtype: "torch.dtype",
    top_k: int,
    max_tokens: int,
    experts_per_rank: int,
    num_ranks: int | None = None,
    device: str = "cpu",
) -> "list[All2All]":
    """Return the backends that `plan_moe` may choose from, best first.

    Backends that are unavailable here are included as `UnavailableBackend`. num_ranks: the number
    of ranks over which the experts are sharded; None: as `config` says. Raises ConfigError for an
    unknown name.
    """
    from moeserve.moe.all2all.base import UnavailableBackend
    from moeserve.moe.all2all.wire_format import wire_of

    facts = BackendFacts(
        hidden_size=hidden_size,
        dtype=dtype,
        top_k=top_k,
        max_tokens=max_tokens,
        experts_per_rank=experts_per_rank,
        num_ranks=num_ranks or (config.num_ranks if config.ep == "on" else 1),
        num_hosts=config.nnodes,
        device=device,
        comm_sms=config.comm_sms or COMM_SMS,
        is_comm_sms_set=config.comm_sms is not None,
        encrypt_rows=config.encrypt_rows,
        wire=wire_of(config.wire, dtype),
    )
    name = config.all2all
    check_name(name)
    if facts.num_ranks == 1:
        local = _make("local", facts)
        if name in ("auto", "local"):
            return [local]
        return [UnavailableBackend(name, "one rank has all experts: nothing is sent"), local]
    names = AUTO.get(device, ()) if name == "auto" else (name,)
    return [_make(each, facts) for each in names]


def _make(name: str, facts: BackendFacts) -> "All2All":
    from moeserve.moe.all2all.base import UnavailableBackend

    try:
        maker = BACKENDS[name]
    except ImportError as error:
        return UnavailableBackend(name, f"its module cannot be imported: {error}")
    try:
        backend = maker(facts)
    except Unavailable as why:
        return UnavailableBackend(name, str(why))
    if facts.encrypt_rows and not backend.caps.encrypts:
        return UnavailableBackend(
            name,
            "it does not encrypt rows; to use it, remove --encrypt-rows and connect the machines "
            "by a private network",
        )
    return backend
