"""Every backend for several ranks, by name, and how ranks as threads use one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeVar

import torch

from moeserve.config import ParallelConfig
from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.nccl import DeviceAll2All, DeviceAllGather
from moeserve.moe.all2all.registry import BackendFacts, make_backends
from moeserve.moe.all2all.wire_format import wire_of
from moeserve.ops.native import native
from tests.comm.ranks import members_of, together

T = TypeVar("T")
BY_NCCL = {"torch by nccl": DeviceAll2All, "allgather by nccl": DeviceAllGather}  # over tests/comm/fake_nccl.py
ON_CPU = ("torch", "allgather", *(("shm",) if native() is not None else ()))
INTERPRETED = frozenset({"cuda_ipc"})  # slow: fewer of the larger cases
NAMES: tuple[str, ...] = (*ON_CPU, *BY_NCCL)
if native() is not None and find_spec("triton") is not None and not torch.cuda.is_available():
    NAMES += tuple(INTERPRETED)
WIDTH = 24
SLOTS = 3  # of one rank
TOP_K = 3
MAX_TOKENS = 40


def make(name: str, dtype: torch.dtype, ranks: int, wire: str = "auto", max_tokens: int = MAX_TOKENS) -> All2All:
    """The backend itself where one rank would be given `local`; `cuda_ipc` with interpreted kernels."""
    if name in BY_NCCL:
        return BY_NCCL[name](wire_of(wire, dtype), WIDTH, dtype, TOP_K, max_tokens, 24)
    if name == "cuda_ipc":
        from moeserve.moe.all2all.cuda_ipc import CudaIpcAll2All
        from tests.comm.host_memory import host_symmetric

        facts = BackendFacts(
            hidden_size=WIDTH, dtype=dtype, top_k=TOP_K, max_tokens=max_tokens, num_slots=SLOTS, num_ranks=ranks,
            wire=wire_of(wire, dtype), comm_sms=1,
        )  # fmt: skip
        return CudaIpcAll2All(facts, *host_symmetric())
    (backend,) = make_backends(
        ParallelConfig(dp=max(2, ranks), all2all=name, wire=wire),  # type: ignore[arg-type]
        hidden_size=WIDTH,
        dtype=dtype,
        top_k=TOP_K,
        max_tokens=max_tokens,
        num_slots=SLOTS,
    )
    assert backend.caps.name == name, backend.caps.obstacle
    return backend


class Group:
    """Ranks of one epoch, each a backend that a thread uses."""

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
    """settings: deadline_s of the members, max_tokens of the backends."""
    members = members_of(ranks, directory, deadline_s=settings.get("deadline_s", 20.0))
    backends = [make(name, dtype, ranks, wire, int(settings.get("max_tokens", MAX_TOKENS))) for _ in members]
    together([lambda b=b, m=m: b.join(m, SLOTS, ubatches) for b, m in zip(backends, members, strict=True)])  # type: ignore[misc]
    try:
        yield Group(backends)
    finally:
        for backend in backends:
            backend.leave()
