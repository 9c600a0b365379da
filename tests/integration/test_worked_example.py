"""The four tokens on two ranks of docs/expert-parallelism.md, on every backend."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.config import ParallelConfig
from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.registry import make_backends
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.placement.placement import Placement
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from tests.comm.ranks import members_of, together
from tests.moe.contract.backends import ON_CPU

PAGE = Path(__file__).parents[2] / "docs" / "expert-parallelism.md"
WIDTH = 8
TOKENS = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}  # every element of a token's row
OWNER = {"a": 0, "b": 0, "c": 1, "d": 1}


def routing_table() -> dict[str, tuple[list[int], list[float]]]:
    """Return token -> chosen experts and their weights, as in the page."""
    found = {}
    for token, _, ids, weights in re.findall(
        r"^\| (\w) \| (\d) \| ([\d, ]+) \| ([\d., ]+) \|$", PAGE.read_text(), re.M
    ):
        found[token] = ([int(x) for x in ids.split(",")], [float(x) for x in weights.split(",")])
    return found


def inbound_table() -> dict[int, dict[int, list[str]]]:
    """Return rank -> slot -> rows in order, as in the page."""
    found: dict[int, dict[int, list[str]]] = {0: {}, 1: {}}
    for rank, slot, rows in re.findall(
        r"^ +\| (\d) \| (\d) \| ([\w·, ]+) \|$", PAGE.read_text(), re.M
    ):
        found[int(rank)][int(slot)] = [row.strip() for row in rows.split(",")]
    return found


def expert(number: int, x: torch.Tensor) -> torch.Tensor:
    return x * (10.0**number)


@pytest.mark.parametrize("name", ON_CPU)
def test_the_page_tells_what_happens(name: str, tmp_path: Path) -> None:
    chosen = routing_table()
    arrives = inbound_table()
    assert set(chosen) == set(TOKENS)
    slots = LogicalToPhysical(Placement.initial(1, 4, 2), 0)

    def rank(backend: All2All, mine: int) -> tuple[np.ndarray, list[list[float]], torch.Tensor]:
        tokens = [t for t in TOKENS if OWNER[t] == mine]
        x = torch.stack([torch.full((WIDTH,), TOKENS[t]) for t in tokens])
        ids = torch.tensor([chosen[t][0] for t in tokens], dtype=torch.int32)
        routing = slots(Routing(ids, torch.tensor([chosen[t][1] for t in tokens])))
        ubatch = UBatch()
        ticket = backend.dispatch(x, routing, ubatch).wait()
        inbound = ticket.inbound
        rows = []
        start = 0
        y = torch.empty_like(inbound.x) if ticket.y is None else ticket.y
        for slot, end in enumerate(inbound.ends_e.tolist()):
            rows.append(inbound.x[start:end, 0].tolist())
            y[start:end] = expert(2 * mine + slot, inbound.x[start:end])
            start = end
        out = backend.combine(ticket, y, torch.empty_like(x), ubatch).wait().clone()
        return inbound.counts_e.copy(), rows, out

    members = members_of(2, str(tmp_path))
    backends = [
        make_backends(
            ParallelConfig(dp=2, all2all=name),
            hidden_size=WIDTH,
            dtype=torch.float32,
            top_k=2,
            max_tokens=4,
            experts_per_rank=2,
        )[0]
        for _ in members
    ]
    together([lambda b=b, m=m: b.join(m, 2, 1) for b, m in zip(backends, members, strict=True)])
    try:
        results = together([lambda b=b, r=r: rank(b, r) for r, b in enumerate(backends)])
    finally:
        for backend in backends:
            backend.leave()

    for mine, (counts, rows, out) in enumerate(results):
        assert counts.tolist() == [3, 1]
        for slot in range(2):
            named = arrives[mine][2 * mine + slot]
            assert rows[slot] == [TOKENS[row[0]] for row in named]
            assert all(chosen[row[0]][0][int(row[2])] == 2 * mine + slot for row in named)
        for value, token in zip(out, [t for t in TOKENS if OWNER[t] == mine], strict=True):
            ids, weights = chosen[token]
            x = torch.full((WIDTH,), TOKENS[token])
            first, second = (expert(e, x) * w for e, w in zip(ids, weights, strict=True))
            assert torch.equal(value, first + second)
