"""Two ranks, engines or one engine's, whose rows travel by `cuda_ipc` or NCCL, recorded and not,
give one rank's bits. Kernels are interpreted, device memory is the host's, NCCL is Gloo, and ranks
are threads: the interpreter serves one of them at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from moeserve.comm.tensor import DeviceTensor
from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.engine.plan import StepDecision, StepPlan, StepResult
from moeserve.errors import ConfigError
from moeserve.models.build import build_decoder
from moeserve.models.load_plan import load_plan
from moeserve.moe.all2all.nccl import NcclAll2All
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.all2all.wire_format import wire_of
from moeserve.ops.native import native
from moeserve.ops.pick import pick_ops
from moeserve.runner.base import first_placement
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.load import Progress, Shard
from tests.comm import fake_nccl
from tests.comm.ranks import members_of, together
from tests.runner.harness import Driver, Request, greedy, spec_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels are not interpreted"),
    pytest.mark.skipif(native() is None, reason="ranks meet in shared memory"),
]
SPEC: dict[str, Any] = {
    "architecture": "Qwen3MoeForCausalLM",
    "qk_norm": "head",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_size": 16,
    "num_layers": 1,
    "moe_layers": (True,),
    "windows": (None,),
    "max_position": 64,
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "kv_cache_bytes": 1 << 20,
    "kernels": "triton",
    "determinism": "full",
}
PROMPTS = [[3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14]]


class Rank(CPUModelRunner):
    """A rank whose weights are the same for every number of ranks."""

    kind = "cuda_ipc"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.world.tp_size > 1:
            self.tp = DeviceTensor(
                self.world.tp_rank, self.world.tp_size, len(self.ubatches.ubatches)
            )

    def load_model(self, progress: Progress) -> None:
        spec = self.spec
        placement = self.placement
        assert placement is not None
        plan = load_plan(spec, (), self.world, placement)
        params = {param.name: torch.empty(param.shape) for param in plan.params}
        for piece in plan.pieces:
            generator = torch.Generator().manual_seed(crc32(piece.source.encode()))
            values = torch.randn(piece.shape, generator=generator) * 0.2 + ("norm" in piece.source)
            assert not piece.transposed
            params[piece.param][piece.at] = values[piece.take]
        shard = self.shard()
        ops = pick_ops(self.device, self.dtype, "triton", exact=True)
        self.model = build_decoder(
            spec,
            params,
            ops,
            world=self.world,
            tp=shard.tp,
            placement=placement,
            backends=shard.backends,
            ubatches=shard.ubatches,
            max_tokens=shard.max_tokens,
        )

    def shard(self) -> Shard:
        shard = super().shard()
        if not self.shards_experts:
            return shard
        from moeserve.moe.all2all.cuda_ipc import CudaIpcAll2All
        from tests.comm.host_memory import host_symmetric

        assert self.placement is not None
        facts = BackendFacts(
            hidden_size=self.spec.hidden_size,
            dtype=self.dtype,
            top_k=self.spec.experts_per_token,
            num_ranks=2,
            max_tokens=self.max_tokens,
            experts_per_rank=self.placement.experts_per_rank,
            comm_sms=1,
            wire=wire_of("auto", self.dtype),
        )
        backend: Any = (
            NcclAll2All(facts) if self.kind == "nccl" else CudaIpcAll2All(facts, *host_symmetric())
        )
        backend.caps = replace(backend.caps, devices=frozenset({"cpu"}))
        return shard._replace(backends=[backend])

    def warm_up(self) -> None: ...


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_nccl.use(monkeypatch)
    from triton.runtime.interpreter import GridExecutor

    from tests.comm import host_memory
    from tests.kernels.interpreted import ordered_dots

    lock = threading.RLock()
    call = GridExecutor.__call__

    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return call(*args, **kwargs)

    monkeypatch.setattr(host_memory, "INTERPRETER", lock)
    monkeypatch.setattr(GridExecutor, "__call__", locked)
    with ordered_dots():
        yield


def driver_of(world: World, graphs: str, dbo: str = "off") -> Driver:
    ranks = {"dp": world.size // world.tp_size, "tp": world.tp_size}
    spec = spec_of(**SPEC)
    config = config_of(None, graphs=graphs, dbo=dbo, **ranks, **SETTINGS)
    placement = first_placement(config, spec, world)
    runner = Rank(config, spec, Path(), world, placement)
    runner.prepare()
    return Driver(runner)


@cache
def alone() -> list[Request]:
    driver = driver_of(World(), "off")
    requests = [driver.add(Request(list(prompt), greedy())) for prompt in PROMPTS]
    for request in requests:
        driver.generate(request, 4, chunk=4)
    return requests


def step(drivers: list[Driver], chunks: list[list[tuple[Request, int]]], number: int) -> None:
    """One that the ranks agreed on; one of them may have no tokens."""
    plans = [driver.plan(mine) for driver, mine in zip(drivers, chunks, strict=True)]
    if len(drivers[0].runner.ubatches.ubatches) == 1:
        decision = StepDecision(number, most_tokens=(max(plan.num_tokens for plan in plans), 0))
    else:
        plans = [replace(plan, split_at=(plan.num_tokens + 1) // 2) for plan in plans]
        first = max(plan.split_at for plan in plans)
        second = max(plan.num_tokens - plan.split_at for plan in plans)
        decision = StepDecision(number, 2, (first, second))

    def run(driver: Driver, plan: StepPlan) -> Callable[[], StepResult]:
        return lambda: driver.runner.execute(replace(plan, decision=decision))

    results = together([run(*one) for one in zip(drivers, plans, strict=True)])
    for driver, mine, plan, result in zip(drivers, chunks, plans, results, strict=True):
        driver.update_from_output(mine, plan, result)


@pytest.mark.full("graphs", keep=1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
@pytest.mark.parametrize(
    ("graphs", "dbo"),
    [("off", "off"), ("off", "on"), ("full", "off"), ("piecewise", "off"), ("full", "on")],
)
def test_two_ranks_give_the_bits_of_one(
    graphs: str, dbo: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "kind", kind)
    expected = alone()
    drivers = [
        driver_of(World(rank=rank, size=2, ranks_on_host=2, host_rank=rank), graphs, dbo)
        for rank in range(2)
    ]
    members = members_of(2, str(tmp_path))
    together(
        [lambda d=d, m=m: d.runner.join(m, None) for d, m in zip(drivers, members, strict=True)]
    )  # type: ignore[misc]
    (left, right), (a, b, c) = drivers, [Request(list(prompt), greedy()) for prompt in PROMPTS]
    for driver, request in ((left, a), (right, b), (left, c)):
        driver.add(request)
    steps: list[list[list[tuple[Request, int]]]] = [
        [[(a, 4)], [(b, 2)]],
        [[(a, 2), (c, 4)], [(b, 1)]],
        [[(a, 1), (c, 1)], []],
        [[(c, 1), (a, 1)], [(b, 1)]],
        [[(a, 1)], [(b, 1)]],
        [[(c, 1)], []],
    ]
    for number, chunks in enumerate(steps):
        step(drivers, chunks, number)
    for mine, theirs in zip((a, b, c), expected, strict=True):
        assert len(mine.output) == 4
        assert mine.output == theirs.output
        assert all(map(torch.equal, mine.logits, theirs.logits))
        for result in mine.results:
            assert np.asarray(result.expert_tokens_LE).sum() > 0
    recorded = [getattr(driver.runner.graphs, "_recordings", ()) for driver in drivers]
    assert all(bool(some) == (graphs != "off") for some in recorded), recorded
    for driver in drivers:
        driver.runner.leave()
        driver.runner.close()


def test_ranks_that_round_steps_in_other_ways_do_not_serve_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines with and without Triton are an example.

    They would allocate for different numbers of tokens.
    """
    monkeypatch.setattr(Rank, "kind", "nccl")
    worlds = [World(rank=rank, size=2, ranks_on_host=2, host_rank=rank) for rank in range(2)]
    drivers = [
        driver_of(world, graphs) for world, graphs in zip(worlds, ("full", "off"), strict=True)
    ]
    members = members_of(2, str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"4 sizes of recorded steps .none without Triton. up to 8.*same packages"
    ):
        together(
            [lambda d=d, m=m: d.runner.join(m, None) for d, m in zip(drivers, members, strict=True)]
        )  # type: ignore[misc]
    for driver in drivers:
        driver.runner.close()


STEPS = [
    [(0, 4), (1, 2)],
    [(0, 2), (2, 4), (1, 1)],
    [(0, 1), (2, 1)],
    [(2, 1), (0, 1), (1, 1)],
    [(0, 1), (1, 1)],
]


@pytest.mark.full("graphs", keep=1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["nccl", "cuda_ipc"])
@pytest.mark.parametrize("graphs", ["off", "full", "piecewise"])
def test_two_ranks_of_an_engine(
    kind: str, graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share each step's tokens; in a recorded step, the padding as well."""
    monkeypatch.setattr(Rank, "kind", kind)
    expected = alone()
    worlds = [
        World(rank=rank, size=2, tp_size=2, ranks_on_host=2, host_rank=rank) for rank in range(2)
    ]
    drivers = [driver_of(world, graphs) for world in worlds]
    members = members_of(2, str(tmp_path), tp_size=2)
    together(
        [lambda d=d, m=m: d.runner.join(m, None) for d, m in zip(drivers, members, strict=True)]
    )  # type: ignore[misc]
    requests = [
        [driver.add(Request(list(prompt), greedy())) for prompt in PROMPTS] for driver in drivers
    ]
    for number, chunks in enumerate([*STEPS, [(2, 1)]]):
        step(
            drivers,
            [[(mine[index], chunk) for index, chunk in chunks] for mine in requests],
            number,
        )
    for mine in requests:
        for request, same in zip(mine, expected, strict=True):
            assert request.output == same.output
            assert all(map(torch.equal, request.logits, same.logits))
    shapes = [set(getattr(driver.runner.graphs, "_recordings", ())) for driver in drivers]
    assert shapes[0] == shapes[1]
    assert bool(shapes[0]) == (graphs != "off")
    for driver in drivers:
        driver.runner.leave()
        driver.runner.close()
