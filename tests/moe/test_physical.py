"""Slots of pairs against a loop over them; shares of replicas; loads."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.moe.physical import MAX_TURNS, LogicalToPhysical
from moeserve.moe.placement.placement import Placement
from moeserve.moe.routing import Routing


def routing(tokens: int, experts: int, top_k: int, seed: int, padding: int = 0) -> Routing:
    ids = torch.randint(
        0,
        experts,
        (tokens, top_k),
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.int32,
    )
    ids[tokens - padding :] = -1
    return Routing(ids, torch.rand(tokens, top_k))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 30),
    st.integers(0, 40),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_every_pair_gets_a_replica_of_its_expert(
    experts: int, ranks: int, redundant: int, tokens: int, top_k: int, seed: int
) -> None:
    start = Placement.initial(3, experts, ranks, redundant)
    placement = Placement(
        1, ranks, experts, np.random.default_rng(seed).permuted(start.experts_LS, axis=1)
    )
    asked = routing(tokens, experts, top_k, seed, padding=min(tokens, seed % 3))
    for layer in range(3):
        row = placement.experts_LS[layer].tolist()
        got = LogicalToPhysical(placement, layer)(asked)
        assert got.weights_TK is asked.weights_TK
        assert got.ids_TK.dtype == torch.int32
        assert got.ids_TK.shape == asked.ids_TK.shape
        for t, (ids, mapped) in enumerate(
            zip(asked.ids_TK.tolist(), got.ids_TK.tolist(), strict=True)
        ):
            for expert, physical in zip(ids, mapped, strict=True):
                if expert == -1:
                    assert physical == -1
                    continue
                assert row[physical] == expert
                replicas = [s for s, e in enumerate(row) if e == expert]
                turns = np.lcm.reduce([row.count(e) for e in range(experts)])
                if turns <= MAX_TURNS:
                    assert physical == replicas[(t + layer) % len(replicas)]


def test_shares_of_replicas_are_even_however_many_there_are() -> None:
    row = np.array(
        [[0] * 7 + [1] * 5 + [2] * 3 + [3] * 11], np.int32
    )  # least common multiple 1,155
    to_physical = LogicalToPhysical(Placement(1, 2, 4, row), 0)
    tokens = 64 * 50
    ids = torch.arange(4, dtype=torch.int32).expand(tokens, 4).contiguous()
    got = to_physical(Routing(ids, torch.ones(tokens, 4))).ids_TK
    for expert, first, count in ((0, 0, 7), (1, 7, 5), (2, 12, 3), (3, 15, 11)):
        share = np.bincount(got[:, expert].numpy(), minlength=26)[first : first + count] / tokens
        assert share.sum() == 1
        assert share.max() - share.min() <= 1 / MAX_TURNS + 1e-9


def test_experts_in_order_need_no_lookup() -> None:
    asked = routing(5, 6, 2, seed=0)
    assert LogicalToPhysical(Placement.initial(1, 6, 3), 0)(asked) is asked
    assert LogicalToPhysical(Placement.initial(1, 6, 3, redundant=3), 0)(asked) is not asked


@pytest.mark.parametrize("tokens", [0, 1, 1024, 1025, 5000])
def test_a_step_of_any_size(tokens: int) -> None:
    placement = Placement.initial(2, 6, 3, redundant=3)
    to_physical = LogicalToPhysical(placement, 1)
    for count in (tokens, 3, tokens):
        asked = routing(count, 6, 3, seed=count)
        got = to_physical(asked).ids_TK.numpy()
        assert (placement.experts_LS[1][got] == asked.ids_TK.numpy()).all()


def test_load_counts_pairs_of_logical_experts_without_padding() -> None:
    to_physical = LogicalToPhysical(Placement.initial(1, 6, 2, redundant=2), 0)
    asked = routing(50, 5, 3, seed=1, padding=7)
    load = to_physical.count_load(asked)
    assert load.dtype == np.int64
    assert load.tolist() == [int((asked.ids_TK == e).sum()) for e in range(6)]
    assert load.sum() == 43 * 3
    assert to_physical.count_load(routing(0, 6, 3, seed=0)).tolist() == [0] * 6


def test_loads_counted_on_the_device_are_those_counted_on_the_host() -> None:
    ids_TK = torch.tensor([[0, 5], [5, 2], [-1, -1], [5, 0]], dtype=torch.int32)
    routing = Routing(ids_TK, torch.ones(4, 2))
    placement = Placement.initial(1, 6, 2, redundant=2)
    host, device = (
        LogicalToPhysical(placement, 0, counts_on_device=on_device) for on_device in (False, True)
    )
    counts = device.with_placement(placement).count_load(routing)
    assert isinstance(counts, torch.Tensor)
    assert counts.tolist() == host.count_load(routing).tolist() == [2, 0, 1, 0, 0, 3]
    assert isinstance(host.with_placement(placement).count_load(routing), np.ndarray)


def test_what_a_recorded_step_reads_stays_where_it_is() -> None:
    """A graph knows only addresses and keeps no memory alive."""
    to_physical = LogicalToPhysical(
        Placement(1, 2, 2, np.array([[0, 1, 1, 0]], np.int32)), 0, counts_on_device=True
    )
    to_physical(routing(8, 2, 1, seed=0))
    recorded = weakref.ref(to_physical._starts_T1)
    to_physical(routing(3000, 2, 1, seed=0))
    assert recorded() is not None
