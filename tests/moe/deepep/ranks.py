"""Ranks as threads that use an adapter over the fake package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.deepep import ADAPTERS
from moeserve.moe.all2all.deepep.base import DeepEP
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.all2all.wire_format import wire_of
from moeserve.moe.routing import Routing
from tests.comm.ranks import members_of, together
from tests.moe.deepep import fake

T = TypeVar("T")
NAMES = tuple(ADAPTERS)
WIDTH = 24  # every adapter pads it
LOCAL = 3
TOP_K = 3
MAX_TOKENS = 40


def facts(ranks: int, wire: str = "auto", width: int = WIDTH, **changes: Any) -> BackendFacts:
    return BackendFacts(
        **{
            "hidden_size": width,
            "dtype": torch.bfloat16,
            "top_k": TOP_K,
            "max_tokens": MAX_TOKENS,
            "experts_per_rank": LOCAL,
            "num_ranks": ranks,
            "wire": wire_of(wire, torch.bfloat16),
            **changes,
        }
    )


@contextmanager
def joined(
    adapter: type[DeepEP], ranks: int, wire: str = "auto", width: int = WIDTH, ubatches: int = 1
) -> Iterator[Any]:
    """Yield the adapters of all ranks. They leave together, and every buffer is destroyed."""
    backends = [adapter(fake, facts(ranks, wire, width)) for _ in range(ranks)]
    calls = [
        lambda b=b, m=m: b.join(m, LOCAL, ubatches)
        for b, m in zip(backends, members_of(ranks), strict=True)
    ]
    together(calls)
    try:
        yield backends
    finally:
        together([backend.leave for backend in backends])


def on_all(backends: list[Any], work: Callable[[int, All2All], T]) -> list[T]:
    """Run `work` on every rank."""
    return together([lambda r=r: work(r, backends[r]) for r in range(len(backends))])  # type: ignore[misc]


def some(
    tokens: int, ranks: int, seed: int, width: int = WIDTH, top_k: int = TOP_K
) -> tuple[Tensor, Routing]:
    """Return tokens with distinct experts, some of them missing."""
    rng = np.random.default_rng(seed)
    ids = np.array(
        [rng.permutation(ranks * LOCAL)[:top_k] for _ in range(tokens)], np.int32
    ).reshape(tokens, top_k)
    ids[rng.random(ids.shape) < 0.1] = -1
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator).bfloat16()
    return x, Routing(torch.from_numpy(ids), torch.rand(ids.shape, generator=generator))
