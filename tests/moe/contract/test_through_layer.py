"""The whole MoE layer over every backend: rounds, replicas in random places, shared experts, idle
ranks, processes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.reference import ReferenceExperts
from moeserve.moe.layer import MoELayer
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.ping_pong import PingPong
from moeserve.moe.placement.placement import Placement
from moeserve.moe.routing import Router
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import RowContext
from moeserve.ops.pick import pick_ops
from moeserve.ops.rules import RouterRule
from moeserve.ops.table import Ops
from tests.comm.ranks import members_of, together
from tests.moe.contract.backends import INTERPRETED, LOCAL, NAMES, ON_CPU, TOP_K, WIDTH, group, make
from tests.warm import Program

EXPERTS = 5
TOKENS = (33, 7, 0, 12)  # of each rank


@cache
def plain_ops() -> Ops:
    return pick_ops("cpu", torch.float32)


def layer_of(backend: All2All, placement: Placement, rank: int) -> MoELayer:
    """The same layer on every rank, with the experts that live there."""
    generator = torch.Generator().manual_seed(5)
    ops = plain_ops()
    gate = torch.randn(EXPERTS, WIDTH, generator=generator)
    w13 = torch.randn(EXPERTS, 32, WIDTH, generator=generator) / 5
    w2 = torch.randn(EXPERTS, WIDTH, 16, generator=generator) / 4
    rule = RouterRule(renormalize=True)
    kernel = ReferenceExperts(ops)
    own = placement.local_experts(0, rank)
    return MoELayer(
        Router(ops.pack_linear(gate, None), TOP_K, rule, ops),
        backend,
        kernel,
        kernel.pack(ExpertWeights(w13[own], w2[own])),
        LogicalToPhysical(placement, 0),
        lambda x, context: 3 * x,
    )


def rows_of(rank: int) -> Tensor:
    return torch.randn(TOKENS[rank], WIDTH, generator=torch.Generator().manual_seed(rank))


def outputs(backend: All2All, placement: Placement, rank: int) -> list[Tensor]:
    """Two steps of one rank."""
    layer = layer_of(backend, placement, rank)
    ubatch = UBatch()
    x = rows_of(rank)
    outs = []
    for _ in range(2):
        ubatch.most_tokens = max(TOKENS[: placement.num_ranks])
        if len(x):
            outs.append(layer(x, RowContext(len(x)), ubatch))
        else:
            layer.serve(torch.empty(WIDTH), ubatch)
    return outs


def expected(rank: int) -> Tensor:
    """One rank with every expert once."""
    x = rows_of(rank)
    return layer_of(LocalAll2All(EXPERTS), Placement.initial(1, EXPERTS, 1), 0)(
        x, RowContext(len(x)), UBatch()
    )


def random_placement(ranks: int, seed: int) -> Placement:
    """Every expert once at least, the others anything."""
    rng = np.random.default_rng(seed)
    spare = rng.integers(0, EXPERTS, ranks * LOCAL - EXPERTS)
    row = rng.permutation(np.concatenate((np.arange(EXPERTS), spare)))
    return Placement(seed, ranks, EXPERTS, row.astype(np.int32)[None])


SIZES = [(2, 40), (2, 10), (4, 33), (4, 8), (3, 1)]
LAYERS = [(name, *size) for name in NAMES for size in (SIZES[:1] if name in INTERPRETED else SIZES)]


@pytest.mark.full("ranks", keep="each")
@pytest.mark.parametrize(("name", "ranks", "max_tokens"), LAYERS)
def test_bits_of_the_layer(name: str, ranks: int, max_tokens: int, tmp_path: Path) -> None:
    """Steps beyond a backend's capacity go in rounds; wherever experts live, the bits stay."""
    placements = [random_placement(ranks, seed) for seed in range(3)]
    with group(name, torch.float32, ranks, str(tmp_path), max_tokens=max_tokens) as ranks_of:
        found = ranks_of.run(
            lambda r, backend: [out for p in placements for out in outputs(backend, p, r)]
        )
    for rank, outs in enumerate(found):
        assert len(outs) == (6 if TOKENS[rank] else 0)
        assert all(torch.equal(out, expected(rank)) for out in outs), rank


@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_of_two_ubatches(ranks: int, tmp_path: Path) -> None:
    """Results of an exchange that go out in two parts, while the other micro-batch's rows are on
    their way.
    """

    def work(rank: int, backend: All2All) -> list[Tensor]:
        layer = layer_of(backend, random_placement(ranks, 2), rank)
        x = rows_of(rank)
        ubatches = (UBatch(0), UBatch(1))
        ping_pong = PingPong(2)
        outs: dict[int, Tensor] = {}
        sent: list[int] = []
        ubatches[0].couple(ping_pong, ubatches[1])
        ubatches[1].couple(ping_pong, ubatches[0])
        before = ubatches[1].send_early

        def counted(send: Callable[[], None]) -> None:
            sent.append(rank)
            before(send)

        ubatches[1].send_early = counted  # type: ignore[method-assign]

        def run(ubatch: UBatch) -> None:
            part = x[: len(x) // 3] if ubatch.index == 0 else x[len(x) // 3 :]
            ubatch.most_tokens = max(TOKENS[:ranks])

            def twice() -> None:
                for _ in range(2):
                    outs[ubatch.index] = layer(part, RowContext(len(part)), ubatch)

            ubatch.run_in_turns(twice)

        together([lambda ubatch=ubatch: run(ubatch) for ubatch in ubatches])  # type: ignore[misc]
        assert len(sent) >= 2
        return [torch.cat([outs[0], outs[1]])]

    with group("torch", torch.float32, ranks, str(tmp_path), ubatches=2) as ranks_of:
        found = ranks_of.run(work)
    for rank, (out,) in enumerate(found):
        assert torch.equal(out, expected(rank)), rank


PROCESS = """
import sys, msgspec, torch
from moeserve.comm.members import Members
from tests.moe.contract import test_through_layer as here
torch.set_num_threads(1)
here.run_process(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Members), sys.argv[3])
"""


def run_process(name: str, members: Members, path: str) -> None:
    backend = make(name, torch.float32, members.size)
    backend.join(members, LOCAL, 1)
    outs = outputs(backend, random_placement(members.size, 1), members.rank)
    torch.save(outs, path)
    backend.leave()


@pytest.mark.parametrize("name", ON_CPU)
def test_ranks_in_processes(name: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Program(
                    PROCESS, name, msgspec.json.encode(m).decode(), str(tmp_path / f"{m.rank}.pt")
                )
            )
            for m in members_of(2, str(tmp_path))
        ]
        assert [child.wait(50) for child in children] == [0, 0]
    for rank in range(2):
        for out in torch.load(tmp_path / f"{rank}.pt"):
            assert torch.equal(out, expected(rank))
