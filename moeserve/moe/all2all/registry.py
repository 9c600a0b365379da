"""The all2all backends by name; packages add theirs by entry points of "moeserve.all2all".

An entry is a callable that takes `BackendFacts` and returns an `All2All`, or raises `Unavailable`
with the reason why it cannot serve here. Users choose a plugin's backend by name: `auto` considers
built-in ones only. This module does not import torch, because settings are checked without it.
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

# One backend is one file and its entry here.
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
# device -> backends that `auto` offers, best first
AUTO = {"cpu": ("shm", "torch"), "cuda": ("deepep_v2", "deepep_ll", "cuda_ipc", "torch")}
# In the worst case every token of every rank has all its experts on one rank. The rows that are
# planned for depend only on what all ranks of all epochs share; the tokens of a round also depend
# on the size of the group.
ROUND_BYTES = 128 << 20  # for the rows that one dispatch may bring to a rank
ON_GPUS = 4  # times as many: each round reads all experts' weights, and there is more memory
USUAL_RANKS = 8  # planned for where rows are so small that ROUND_BYTES would be far too many
REMOVED = {"allgather": "torch", "deepep_ht": "deepep_v2"}  # name -> successor


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """The facts that a backend is made for; they never change.

    max_tokens: rows of one step on one rank. num_ranks: ranks that the experts are sharded over.
    comm_sms: multiprocessors that moving rows may take. sms_asked: whether the user named that
    number.
    """

    hidden_size: int
    dtype: "torch.dtype"
    top_k: int
    max_tokens: int
    experts_per_rank: int
    num_ranks: int
    num_hosts: int = 1
    device: str = "cpu"
    comm_sms: int = COMM_SMS
    sms_asked: bool = False
    encrypt_rows: bool = False
    wire: "WireFormat"

    @property
    def row_bytes(self) -> int:
        """The bytes of a row as the model has it, not encoded."""
        return self.hidden_size * self.dtype.itemsize

    @property
    def planned_rows(self) -> int:
        """The rows that one dispatch may bring to a rank."""
        return most_rows(self.max_tokens, self.top_k, self.row_bytes, self.device)

    def round_tokens(self, num_ranks: int) -> int:
        """Return the tokens, at least 1, that each of num_ranks ranks may dispatch at once."""
        return max(1, min(self.max_tokens, self.planned_rows // (num_ranks * self.top_k)))


def most_rows(max_tokens: int, top_k: int, row_bytes: int, device: str) -> int:
    """Return the rows that one dispatch may bring to a rank. max_tokens: of one rank's step.
    row_bytes: unencoded.
    """
    budget = ROUND_BYTES if device == "cpu" else ON_GPUS * ROUND_BYTES
    return max(top_k, min(budget // row_bytes, USUAL_RANKS * max_tokens * top_k))


class Unavailable(Exception):
    """A backend cannot serve here; the message says why, and how to change that."""


def check_name(asked: str) -> None:
    """Raise ConfigError for a backend that does not exist, or no longer exists."""
    if asked in REMOVED:
        raise ConfigError(
            f"the all2all backend {asked!r} was removed; use {REMOVED[asked]!r}, or auto"
        )
    BACKENDS.check(asked, "all2all", ("auto", *BACKENDS.built_in))


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
    """Return what `plan_moe` may choose from, best first; all but one may be `UnavailableBackend`.

    num_ranks: ranks that the experts are sharded over; by default as `config` has them. Raises
    ConfigError for an unknown name.
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
        sms_asked=config.comm_sms is not None,
        encrypt_rows=config.encrypt_rows,
        wire=wire_of(config.wire, dtype),
    )
    asked = config.all2all
    check_name(asked)
    if facts.num_ranks == 1:
        unused = (
            []
            if asked in ("auto", "local")
            else [UnavailableBackend(asked, "one rank has all experts: nothing travels")]
        )
        return [*unused, _make("local", facts)]
    names = AUTO.get(device, ()) if asked == "auto" else (asked,)
    return [_make(name, facts) for name in names]


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
            "it does not encrypt rows; without --encrypt-rows it needs a private "
            "network of the machines",
        )
    return backend
