"""Placements from loads: what must hold for any load, and how even it gets for skewed ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.moe.placement.placement import Placement
from moeserve.moe.placement.solve import (
    balance,
    count_fetched,
    rank_loads,
    replica_counts,
    rescaled,
    solve,
)


def zipf(layers: int, experts: int, s: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    share = np.arange(1, experts + 1) ** -s
    return np.stack(
        [rng.multinomial(50_000, rng.permutation(share) / share.sum()) for _ in range(layers)]
    ).astype(float)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Placement]:
    """A load of any shape, often with ties and zeros, and any valid placement to start from."""
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(1, 12))
    layers = draw(st.integers(1, 3))
    redundant = draw(st.integers(0, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    load = np.floor(
        rng.pareto(draw(st.sampled_from([0.5, 1.0, 3.0])), (layers, experts))
        * draw(st.sampled_from([0, 1, 9]))
    )
    start = Placement.initial(layers, experts, ranks, redundant)
    if draw(st.booleans()):
        start = Placement(3, ranks, experts, rng.permuted(start.experts_LS, axis=1))
    return load, start


def naive_rank_loads(load: np.ndarray, placement: Placement) -> np.ndarray:
    out = np.zeros((placement.num_layers, placement.num_ranks))
    for layer in range(placement.num_layers):
        row = placement.experts_LS[layer].tolist()
        for slot, expert in enumerate(row):
            out[layer, slot // placement.experts_per_rank] += load[layer, expert] / row.count(
                expert
            )
    return out


@settings(max_examples=300, deadline=None)
@given(cases())
def test_any_load_gets_a_valid_placement_that_is_no_worse(
    case: tuple[np.ndarray, Placement],
) -> None:
    load, start = case
    new = solve(load, start, 4)  # Placement itself refuses a layer that lacks an expert
    assert (new.version, new.num_ranks, new.experts_LS.shape) == (
        4,
        start.num_ranks,
        start.experts_LS.shape,
    )
    assert np.allclose(rank_loads(load, new), naive_rank_loads(load, new))
    before = rank_loads(load, start).max(1)
    after = rank_loads(load, new).max(1)
    assert (after <= before + 1e-6).all()
    assert (solve(load, start, 4).experts_LS == new.experts_LS).all()
    for layer in range(new.num_layers):
        for rank in range(new.num_ranks):
            was = start.local_experts(layer, rank)
            now = new.local_experts(layer, rank)
            for slot, expert in enumerate(was):
                if was != now and now.count(expert) and was.count(expert) == 1:
                    assert now[slot] == expert, "an expert that stayed on its rank changed its slot"
        changed = (new.experts_LS[layer] != start.experts_LS[layer]).any()
        if changed:
            for expert in range(new.num_experts):
                on = [new.local_experts(layer, rank).count(expert) for rank in range(new.num_ranks)]
                stayed = [
                    start.local_experts(layer, rank).count(expert) > 1
                    for rank in range(new.num_ranks)
                ]
                fine = all(count <= 1 or had for count, had in zip(on, stayed, strict=True))
                assert sum(on) > new.num_ranks or fine, (
                    "two replicas on one rank, though others have none"
                )


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 7), st.integers(0, 6), st.booleans())
def test_another_number_of_ranks(
    case: tuple[np.ndarray, Placement], ranks: int, redundant: int, known: bool
) -> None:
    load, start = case
    new = rescaled(start, ranks, redundant, 9, load if known else None)
    assert new.version == 9
    assert new.experts_per_rank == -(-(start.num_experts + redundant) // ranks)
    same = rescaled(new, ranks, redundant, 10)
    assert known or (same.experts_LS == new.experts_LS).all(), (
        "the same number of ranks needs no move"
    )


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (4, 8), (8, 4), (4, 3), (1, 4), (4, 1)])
def test_rescaling_moves_only_what_it_must(old: int, new: int) -> None:
    start = Placement.initial(3, 16, old)
    grown = rescaled(start, new, 0, 1)
    fetched = count_fetched(start, grown)
    both = min(old, new)
    if new > old:
        assert fetched[:both].sum() == 0, "a rank that stays has all it needs already"
    else:
        assert fetched.sum() == grown.experts_LS.size - 3 * both * start.experts_per_rank
    assert grown.experts_per_rank == -(-16 // new)


def test_ranks_that_get_other_numbers_keep_what_they_have() -> None:
    start = Placement.initial(3, 16, 4)
    without = rescaled(start, 3, 0, 1, old_ranks=[0, 1, 3])
    for new, old in ((0, 0), (1, 1), (2, 3)):
        assert set(start.local_experts(0, old)) <= set(without.local_experts(0, new))
    between = rescaled(start, 8, 0, 1, old_ranks=[0, -1, 1, -1, 2, -1, 3, -1])
    for old in range(4):
        assert set(between.local_experts(0, 2 * old)) <= set(start.local_experts(0, old))


def test_redundant_slots_survive_scaling_there_and_back() -> None:
    start = Placement.initial(2, 5, 2, redundant=1)
    up = rescaled(start, 4, 1, 1)
    assert up.experts_per_rank == 2
    assert rescaled(up, 2, 1, 2).experts_LS.shape == start.experts_LS.shape


@pytest.mark.parametrize("s", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("redundant", [16, 24, 32])
def test_skewed_loads_become_even(s: float, redundant: int) -> None:
    load = zipf(12, 128, s)
    start = Placement.initial(12, 128, 8, redundant)
    new = solve(load, start, 1)
    assert balance(rank_loads(load, new)).min() >= 0.97
    assert rank_loads(load, start).max(1).sum() >= 1.4 * rank_loads(load, new).max(1).sum()
    # What was not counted yet, from the same distribution.
    rng = np.random.default_rng(7)
    fresh = np.stack([rng.multinomial(50_000, row / row.sum()) for row in load]).astype(float)
    assert balance(rank_loads(fresh, new)).min() >= 0.93
    again = solve(fresh, new, 2)
    assert count_fetched(new, again).sum() <= 0.05 * new.experts_LS.size, (
        "the same load again moves next to nothing"
    )


def test_replicas_go_where_the_load_per_replica_is_highest() -> None:
    counts = replica_counts(np.array([[6.0, 3.0, 1.0], [1.0, 1.0, 1.0]]), 5, max_replicas=9)
    assert counts.tolist() == [[3, 1, 1], [2, 2, 1]]
    assert replica_counts(np.array([[9.0, 0.0]]), 8, max_replicas=3).tolist() == [
        [4, 4]
    ]  # none beyond, before all have 3


def test_a_large_model_is_balanced() -> None:
    load = zipf(60, 256, 1.0)
    new = solve(load, Placement.initial(60, 256, 64, 64), 1)
    assert balance(rank_loads(load, new)).min() > 0.9


def test_damaged_placements_are_refused() -> None:
    good = Placement.initial(2, 4, 2).experts_LS
    with pytest.raises(ValueError, match="layer 1 of placement 7 lacks expert 3"):
        Placement(7, 2, 4, np.stack([good[0], np.array([0, 1, 2, 0], np.int32)]))
    with pytest.raises(ValueError, match=r"outside of 0\.\.3"):
        Placement(7, 2, 4, good + 1)
    with pytest.raises(ValueError, match="cannot be sharded evenly"):
        Placement(7, 3, 4, good)


def test_mixing_layers_of_two_placements() -> None:
    a = Placement.initial(3, 4, 2)
    b = Placement(1, 2, 4, Placement.initial(3, 4, 2).experts_LS[:, ::-1].copy())
    mixed = a.with_layers(b, 1, 5)
    assert mixed.version == 5
    assert mixed.experts_LS.tolist() == [[3, 2, 1, 0], [0, 1, 2, 3], [0, 1, 2, 3]]
    with pytest.raises(ValueError, match="different groups"):
        a.with_layers(Placement.initial(3, 4, 4), 1, 6)
    assert Placement.from_table(mixed.to_table()).experts_LS.tolist() == mixed.experts_LS.tolist()
