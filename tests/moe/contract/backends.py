"""All backends for several ranks, by name, and groups of ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from moeserve.moe.all2all.base import All2All, Ticket
from moeserve.moe.all2all.nccl import NcclAll2All
from moeserve.moe.all2all.registry import AUTO, BACKENDS, BackendFacts, Unavailable
from moeserve.moe.all2all.wire_format import wire_of
from moeserve.moe.pending import Transfer
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from moeserve.ops.native import native
from tests.comm.ranks import members_of, together

T = TypeVar("T")
WIDTH = 24
LOCAL = 3  # experts per rank
TOP_K = 3
MAX_TOKENS = 40


def facts_of(
    dtype: torch.dtype, ranks: int = 2, wire: str = "auto", **changes: Any
) -> BackendFacts:
    facts = BackendFacts(
        hidden_size=WIDTH,
        dtype=dtype,
        top_k=TOP_K,
        max_tokens=MAX_TOKENS,
        experts_per_rank=LOCAL,
        num_ranks=ranks,
        wire=wire_of(wire, dtype),
    )
    return replace(facts, **changes)


def on_cpu() -> Iterator[str]:
    """Yield the names that the registry offers on this machine."""
    for name in AUTO["cpu"]:
        with suppress(Unavailable):
            if BACKENDS[name](facts_of(torch.float32)):
                yield name


BY_NCCL = "torch by nccl"  # over tests/comm/fake_nccl.py
SMALL_STEPS = "torch by nccl, small steps"
ON_CPU = tuple(on_cpu())
INTERPRETED = frozenset({"cuda_ipc"})  # slow, so these run fewer of the larger cases
NAMES: tuple[str, ...] = (*ON_CPU, BY_NCCL, SMALL_STEPS)
if native() is not None and find_spec("triton") is not None and not torch.cuda.is_available():
    NAMES += tuple(INTERPRETED)


class SmallSteps(NcclAll2All):
    """All ranks know the largest number of tokens, so the host need not exchange it."""

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Transfer[Ticket]:
        ubatch.most_tokens = ubatch.most_tokens or self._max_tokens
        return super().dispatch(x_TD, routing, ubatch)


def make(
    name: str, dtype: torch.dtype, ranks: int, wire: str = "auto", max_tokens: int = MAX_TOKENS
) -> All2All:
    """Return a backend; `cuda_ipc` gets interpreted kernels.

    It is also used for one rank, where the engine would choose `local`.
    """
    facts = facts_of(dtype, ranks, wire, max_tokens=max_tokens)
    if name in (BY_NCCL, SMALL_STEPS):
        by_nccl = NcclAll2All(facts) if name == BY_NCCL else SmallSteps(facts)
        if name == BY_NCCL:
            by_nccl.caps = replace(by_nccl.caps, recorded_rows=0)
        return by_nccl
    if name == "cuda_ipc":
        from moeserve.moe.all2all.cuda_ipc import CudaIpcAll2All
        from tests.comm.host_memory import host_symmetric

        return CudaIpcAll2All(replace(facts, comm_sms=1), *host_symmetric())
    backend = BACKENDS[name](facts)
    assert backend.caps.name == name
    return backend


class Group:
    """The ranks of one epoch, each a backend that a thread uses."""

    def __init__(self, backends: list[All2All]) -> None:
        self.backends = backends

    def run(self, work: Callable[[int, All2All], T], ranks: list[int] | None = None) -> list[T]:
        chosen = range(len(self.backends)) if ranks is None else ranks
        return together([lambda r=r: work(r, self.backends[r]) for r in chosen])  # type: ignore[misc]


@contextmanager
def group(
    name: str,
    dtype: torch.dtype,
    ranks: int,
    directory: str,
    *,
    ubatches: int = 1,
    wire: str = "auto",
    **settings: float,
) -> Iterator[Group]:
    """Yield a group; settings are deadline_s of the members and max_tokens of the backends."""
    members = members_of(ranks, directory, deadline_s=settings.get("deadline_s", 20.0))
    backends = [
        make(name, dtype, ranks, wire, int(settings.get("max_tokens", MAX_TOKENS))) for _ in members
    ]
    together(
        [
            lambda b=b, m=m: b.join(m, LOCAL, ubatches)
            for b, m in zip(backends, members, strict=True)
        ]
    )  # type: ignore[misc]
    try:
        yield Group(backends)
    finally:
        for backend in backends:
            backend.leave()
