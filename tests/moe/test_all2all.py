"""The contract of every all2all backend, on one rank: each is compared with the formula, pair by
pair.

A backend for several ranks joins `BACKENDS` with its single-rank form and has its own multi-process
tests.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.moe.all2all.base import All2All, Inbound, Layout, Ticket
from moeserve.moe.all2all.layout import group_rows, weighted_sum
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch

NUM_EXPERTS = 6
BACKENDS: list[Callable[[], All2All]] = [lambda: LocalAll2All(NUM_EXPERTS)]
WIDTH = 24


def random_ids(tokens: int, top_k: int, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    ids = [rng.permutation(NUM_EXPERTS)[:top_k] for _ in range(tokens)]
    return torch.tensor(np.array(ids).reshape(tokens, top_k), dtype=torch.int32)


def with_padding(ids_TK: Tensor) -> Tensor:
    ids_TK = ids_TK.clone()
    ids_TK[1::3] = -1
    return ids_TK


CASES = {
    "uneven": random_ids(17, 3, 0),
    "one token": random_ids(1, 3, 1),
    "one expert per token": random_ids(40, 1, 2),
    "all experts of every token": random_ids(9, NUM_EXPERTS, 3),
    "all to one expert": torch.full((30, 1), 4, dtype=torch.int32),
    "padding between": with_padding(random_ids(16, 2, 4)),
    "only padding": torch.full((5, 2), -1, dtype=torch.int32),
    "no tokens": torch.zeros((0, 2), dtype=torch.int32),
    "one of a token's experts missing": torch.tensor([[3, -1], [-1, 2], [1, 0]], dtype=torch.int32),
}


def scale_rows(inbound: Inbound) -> Tensor:
    """Stands in for experts: expert i multiplies by i + 1, exactly."""
    y = torch.empty_like(inbound.x)
    start = 0
    for expert, end in enumerate(inbound.ends_e.tolist()):
        y[start:end] = inbound.x[start:end] * (expert + 1)
        start = end
    return y


def expected(x_TD: Tensor, routing: Routing) -> Tensor:
    """The definition: in order of k, in fp32, rounded once."""
    out = torch.zeros_like(x_TD)
    for t, ids in enumerate(routing.ids_TK.tolist()):
        total = torch.zeros(x_TD.shape[1])
        for k, expert in enumerate(ids):
            if expert >= 0:
                total = total + routing.weights_TK[t, k] * (x_TD[t] * (expert + 1)).float()
        out[t] = total
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make", BACKENDS)
def test_round_trip_is_the_definition(
    make: Callable[[], All2All], case: str, dtype: torch.dtype
) -> None:
    backend = make()
    ubatch = UBatch()
    ids = CASES[case]
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(-8, 9, (len(ids), WIDTH), generator=generator).to(
        dtype
    )  # exact under scale_rows
    routing = Routing(ids, torch.rand(ids.shape, generator=generator))
    ticket = backend.dispatch(x, routing, ubatch).wait()
    inbound = ticket.inbound
    assert inbound.layout is Layout.GROUPED
    assert inbound.counts_e.tolist() == [int((ids == e).sum()) for e in range(NUM_EXPERTS)]
    assert inbound.ends_e.tolist() == np.cumsum(inbound.counts_e).tolist()
    out = torch.full_like(x, torch.nan)
    found = backend.combine(ticket, scale_rows(inbound), out, ubatch).wait()
    assert found is out
    assert torch.equal(out, expected(x, routing))


@pytest.mark.parametrize("make", BACKENDS)
def test_rows_of_an_expert_keep_the_order_of_tokens(make: Callable[[], All2All]) -> None:
    ids = random_ids(50, 2, 5)
    x = torch.arange(50.0)[:, None].expand(-1, WIDTH).contiguous()
    inbound = make().dispatch(x, Routing(ids, torch.ones(ids.shape)), UBatch()).wait().inbound
    start = 0
    for expert, end in enumerate(inbound.ends_e.tolist()):
        assert inbound.x[start:end, 0].tolist() == [
            t for t in range(50) if expert in ids[t].tolist()
        ]
        start = end


@pytest.mark.parametrize("make", BACKENDS)
def test_two_dispatches_in_flight_do_not_mix(make: Callable[[], All2All]) -> None:
    backend = make()
    ubatch = UBatch()
    batches = []
    for seed in (1, 2):
        ids = random_ids(12, 2, seed)
        x = torch.randint(-8, 9, (12, WIDTH), generator=torch.Generator().manual_seed(seed)).float()
        routing = Routing(ids, torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)))
        batches.append((x, routing, backend.dispatch(x, routing, ubatch)))
    for x, routing, pending in reversed(batches):
        pending.launch_receive()
        ticket = pending.wait()
        out = backend.combine(
            ticket, scale_rows(ticket.inbound), torch.empty_like(x), ubatch
        ).wait()
        assert torch.equal(out, expected(x, routing))


@pytest.mark.parametrize("make", BACKENDS)
def test_a_ticket_serves_once(make: Callable[[], All2All]) -> None:
    backend = make()
    ubatch = UBatch()
    ids = random_ids(4, 2, 0)
    x = torch.ones(4, WIDTH)
    ticket: Ticket = backend.dispatch(x, Routing(ids, torch.ones(ids.shape)), ubatch).wait()
    backend.combine(ticket, ticket.inbound.x, torch.empty_like(x), ubatch).wait()
    with pytest.raises(RuntimeError, match="combined already"):
        backend.combine(ticket, ticket.inbound.x, torch.empty_like(x), ubatch)


def test_group_rows_example() -> None:
    rows = group_rows(torch.tensor([[1], [0], [-1], [1]], dtype=torch.int32), 2)
    assert rows.order_P.tolist() == [1, 0, 3]
    assert rows.place_N.tolist() == [1, 0, -1, 2]
    assert rows.counts_e.tolist() == [1, 2]


def test_sum_does_not_depend_on_how_many_terms_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = CASES["padding between"]
    rows = group_rows(ids, NUM_EXPERTS)
    routing = Routing(ids, torch.rand(ids.shape))
    y = torch.randn(len(rows.order_P), WIDTH).bfloat16()
    whole = weighted_sum(y, rows, routing, torch.empty(len(ids), WIDTH, dtype=torch.bfloat16))
    monkeypatch.setattr("moeserve.moe.all2all.layout.MAX_TERMS", 3 * 2 * WIDTH)
    assert torch.equal(whole, weighted_sum(y, rows, routing, torch.empty_like(whole)))
