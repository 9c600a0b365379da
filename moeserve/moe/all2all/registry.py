"""Every all2all backend by name: the built-in ones, and those that other packages register.

A package adds one by an entry point in the group "moeserve.all2all" that names a callable: it takes `BackendFacts` and
returns
an `All2All`, or raises `Unavailable` with the reason why it cannot serve here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec

import torch
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.comm.nccl import why_not
from moeserve.config import COMM_SMS, ParallelConfig
from moeserve.errors import ConfigError
from moeserve.moe.all2all.allgather import AllGatherAll2All
from moeserve.moe.all2all.base import All2All, All2AllCaps, Pending, Ticket
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.all2all.names import AUTO, DEEPEP, check_name, foreign
from moeserve.moe.all2all.nccl import DeviceAll2All, DeviceAllGather
from moeserve.moe.all2all.torch_a2a import TorchAll2All
from moeserve.moe.all2all.wire_format import WireFormat, wire_of
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from moeserve.ops.native import native


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What a backend is made for and what never changes. max_tokens: rows of one step on one rank. num_slots: expert
    slots of one rank. num_ranks: that the experts are sharded over. comm_sms: multiprocessors that moving rows may
    take; sms_asked: whether the user said so."""

    hidden_size: int
    dtype: torch.dtype
    top_k: int
    max_tokens: int
    num_slots: int
    num_ranks: int
    num_hosts: int = 1
    device: str = "cpu"
    comm_sms: int = COMM_SMS
    sms_asked: bool = False
    wire: WireFormat


class Unavailable(Exception):
    """A backend cannot serve here; the message says why, and how to change that."""


class Absent:
    """Stands for a backend that cannot serve, so that the plan can show the reason."""

    def __init__(self, name: str, why: str) -> None:
        self.caps = All2AllCaps(name=name, layouts=frozenset(), wires=frozenset(), obstacle=why)

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        raise AssertionError(self.caps.obstacle)

    def leave(self) -> None:
        """It never joins."""

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Pending[Ticket]:
        raise AssertionError(self.caps.obstacle)

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch) -> Pending[Tensor]:
        raise AssertionError(self.caps.obstacle)


def make_backends(
    config: ParallelConfig,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    top_k: int,
    max_tokens: int,
    num_slots: int,
    num_ranks: int | None = None,
    device: str = "cpu",
) -> list[All2All]:
    """What `plan_moe` may choose from, best first; all but one may be `Absent`.

    num_ranks: that the experts are sharded over; by default what `config` says. Raises ConfigError for an unknown name.
    """
    facts = BackendFacts(
        hidden_size=hidden_size,
        dtype=dtype,
        top_k=top_k,
        max_tokens=max_tokens,
        num_slots=num_slots,
        num_ranks=num_ranks or (config.num_ranks if config.ep == "on" else 1),
        num_hosts=config.nnodes,
        device=device,
        comm_sms=config.comm_sms or COMM_SMS,
        sms_asked=config.comm_sms is not None,
        wire=wire_of(config.wire, dtype),
    )
    check_name(config.all2all)
    makers = _makers()
    asked = config.all2all
    if facts.num_ranks == 1:
        unused = [] if asked in ("auto", "local") else [Absent(asked, "one rank has all experts: nothing travels")]
        return [*unused, _make(facts, "local", makers["local"])]
    return [_make(facts, name, makers[name]) for name in (AUTO[device] if asked == "auto" else (asked,))]


def _make(facts: BackendFacts, name: str, maker: Callable[[BackendFacts], All2All]) -> All2All:
    try:
        return maker(facts)
    except Unavailable as why:
        return Absent(name, str(why))


def _makers() -> dict[str, Callable[[BackendFacts], All2All]]:
    makers: dict[str, Callable[[BackendFacts], All2All]] = {
        "local": lambda facts: LocalAll2All(facts.num_slots, facts.wire),
        "shm": _shm,
        "cuda_ipc": _cuda_ipc,
        "torch": partial(_collective, TorchAll2All, DeviceAll2All),
        "allgather": partial(_collective, AllGatherAll2All, DeviceAllGather),
    }
    for name in DEEPEP:
        makers[name] = _deepep(name)
    for entry in foreign():
        makers.setdefault(entry.name, _third_party(entry))
    return makers


def _collective(by_gloo: Callable[..., All2All], by_nccl: Callable[..., All2All], facts: BackendFacts) -> All2All:
    what = facts.wire, facts.hidden_size, facts.dtype, facts.top_k, facts.max_tokens
    if facts.device == "cpu":
        return by_gloo(*what)
    if (why := why_not(-(-facts.num_ranks // facts.num_hosts))) is not None:
        raise Unavailable(f"{why}; use --all2all cuda_ipc, which serves ranks of one machine")
    return by_nccl(*what, facts.comm_sms)


def _shm(facts: BackendFacts) -> All2All:
    if facts.num_hosts > 1:
        raise Unavailable(f"shm serves one machine, these ranks are on {facts.num_hosts}")
    if facts.device != "cpu":
        raise Unavailable(f"shm moves rows between CPU ranks, these are on {facts.device}")
    if native() is None:
        raise Unavailable("shm needs moeserve's native code; reinstall moeserve with a C++20 compiler")
    from moeserve.moe.all2all.shm import ShmAll2All

    return ShmAll2All(facts.hidden_size, facts.dtype, facts.top_k, facts.max_tokens, facts.wire)


def _cuda_ipc(facts: BackendFacts) -> All2All:
    if facts.num_hosts > 1:
        raise Unavailable(f"cuda_ipc serves one machine, these ranks are on {facts.num_hosts}; use deepep_ht")
    if facts.device != "cuda":
        raise Unavailable(f"cuda_ipc moves rows between GPUs, these ranks are on {facts.device}; use shm")
    if find_spec("triton") is None:
        raise Unavailable("cuda_ipc needs the package triton; pip install triton")
    if native() is None:
        raise Unavailable("cuda_ipc needs moeserve's native code; reinstall moeserve with a C++20 compiler")
    from moeserve.comm.symmetric import CudaMemory, Symmetric
    from moeserve.moe.all2all.cuda_ipc import CudaIpcAll2All

    try:
        memory = Symmetric(CudaMemory(torch.device(facts.device)))
    except ConfigError as error:
        raise Unavailable(str(error)) from None
    return CudaIpcAll2All(facts, memory)


def _deepep(name: str) -> Callable[[BackendFacts], All2All]:
    def make(facts: BackendFacts) -> All2All:
        if find_spec("deep_ep") is None:
            raise Unavailable(
                f"{name} needs CUDA and the package deep_ep: pip install sgl-deep-ep, or build it from "
                "https://github.com/deepseek-ai/DeepEP"
            )
        backend: All2All = import_module("moeserve.moe.all2all.deepep").make(name, facts)
        return backend

    return make


def _third_party(entry: EntryPoint) -> Callable[[BackendFacts], All2All]:
    def make(facts: BackendFacts) -> All2All:
        try:
            maker: Callable[[BackendFacts], All2All] = entry.load()
        except ImportError as error:
            raise Unavailable(f"{entry.value} of another package cannot be imported: {error}") from None
        return maker(facts)

    return make
