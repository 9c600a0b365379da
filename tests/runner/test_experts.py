"""Experts on the move: no bit changes, all ranks change a layer between the same two steps, and
faults harm nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.errors import CheckpointError, ConfigError
from moeserve.messages import PlacementTable
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.reference import GroupedMM, PackedGroupedMM
from moeserve.moe.layer import MoELayer
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.placement.placement import Placement
from moeserve.moe.placement.solve import rescaled
from moeserve.runner import experts
from moeserve.runner.experts import Cancelled, ExpertStore, Pace, ReadExpert
from tests.runner.expert_checkpoint import DTYPES, D, E, write_experts
from tests.runner.expert_group import Group, L, Rank, no_router, ops_of, shuffled


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "CPU_SHARE", 1.0)
    monkeypatch.setattr(experts, "BYTES_PER_S", 1e12)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    write_experts(tmp_path, torch.float32, fused=False)
    made = Group(tmp_path, Placement.initial(L, E, 2, redundant=2))
    yield made
    made.close()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_changes_while_experts_move(tmp_path: Path, fused: bool, dtype: torch.dtype) -> None:
    w13, w2 = write_experts(tmp_path, torch.bfloat16, fused)
    group = Group(tmp_path, Placement.initial(L, E, 4, redundant=4), dtype)
    before = group.outputs()
    assert before.abs().max() > 0

    def check() -> None:
        assert torch.equal(group.outputs(), before)

    for version in range(1, 7):
        target = shuffled(Placement.initial(L, E, 4, redundant=4), version, seed=version)
        group.prepare(target)
        notices = group.until_placed(check)
        assert [(n.version, n.layers, n.error) for n in notices] == [(version, L, "")] * 4
        check()
        for number, rank in enumerate(group.ranks):
            assert rank.store.version == version
            for layer in range(L):
                for (one13, one2), expert in zip(
                    rank.layers[layer].packed, target.local_experts(layer, number), strict=True
                ):
                    eye13 = torch.eye(D, dtype=dtype)
                    eye2 = torch.eye(w2.shape[3], dtype=dtype)
                    assert torch.equal(one13(eye13).T, w13[layer, expert].to(dtype))
                    assert torch.equal(one2(eye2).T, w2[layer, expert].to(dtype))
        assert sum(n.moved_bytes for n in notices) % (w13[0, 0].numel() + w2[0, 0].numel()) == 0
    group.close()


def test_experts_that_are_here_already_are_not_read(tmp_path: Path) -> None:
    write_experts(tmp_path, torch.float32, fused=False)
    start = Placement.initial(L, E, 2)
    group = Group(tmp_path, start)
    before = group.outputs()
    reads: list[tuple[int, int]] = []
    for rank in group.ranks:
        rank.store._read = lambda layer, expert, work, files=group.files[0]: (
            reads.append((layer, expert)),
            files.read(layer, expert, work),
        )[1]
    rows = start.experts_LS.copy()
    rows[0] = [3, 0, 1, 2, 7, 6, 5, 4]  # only within ranks
    rows[1, [0, 7]] = rows[1, [7, 0]]  # one expert each way
    group.prepare(Placement(1, 2, E, rows))
    group.until_placed()
    assert sorted(reads) == [(1, 0), (1, 7)]
    assert torch.equal(group.outputs(), before)
    group.close()


def test_a_slot_lets_go_of_the_weights_that_left_it(group: Group) -> None:
    rank = group.ranks[0]

    def tensor(linear: Any) -> Tensor:
        found: Tensor = (
            getattr(linear, "weight", None) if hasattr(linear, "weight") else linear.packed
        )
        return found

    old = [weakref.ref(tensor(linear)) for one in rank.layers[0].packed for linear in one]
    mirrored = (
        Placement.initial(L, E, 2, redundant=2).experts_LS[:, ::-1].copy()
    )  # nothing stays on its rank
    group.prepare(Placement(1, 2, E, mirrored))
    group.until_placed()
    kept = set(mirrored[0, :5].tolist()) & {0, 1, 2, 3, 4}
    assert sum(ref() is not None for ref in old) == 2 * len(kept)
    owned = [tensor(linear) for one in rank.layers[0].packed for linear in one]
    if hasattr(rank.layers[0].packed[0][0], "weight"):
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in owned)


def failing(read: ReadExpert, at: int) -> ReadExpert:
    """Works `at` times, then the disk is gone."""
    left = at

    def broken(layer: int, expert: int, work: Callable[[int], None]) -> tuple[Tensor, Tensor]:
        nonlocal left
        left -= 1
        if left < 0:
            raise CheckpointError("model.safetensors: Input/output error")
        return read(layer, expert, work)

    return broken


@pytest.mark.parametrize("good_reads", [0, 1, 3, 5])
def test_one_rank_that_cannot_read_ends_it_for_all(
    group: Group, good_reads: int, caplog: pytest.LogCaptureFixture
) -> None:
    start = Placement.initial(L, E, 2, redundant=2)
    swapped = Placement(
        1, 2, E, np.roll(start.experts_LS, 5, axis=1)
    )  # each rank gets what the other one had
    before = group.outputs()
    healthy = group.ranks[1].store._read
    group.ranks[1].store._read = failing(healthy, good_reads)
    with caplog.at_level(logging.ERROR):
        group.prepare(swapped)
        notices = group.until_placed(lambda: None)
    assert [r.message for r in caplog.records] == [
        "placement 1 cannot be prepared: model.safetensors: Input/output error"
    ]
    layers = notices[0].layers
    reads_per_layer = len(set(swapped.local_experts(0, 1)) - set(start.local_experts(0, 1)))
    assert layers == good_reads // reads_per_layer
    assert [(n.version, n.layers) for n in notices] == [(1, layers)] * 2
    assert notices[1].error == "model.safetensors: Input/output error"
    assert notices[0].error == "another rank gave it up"
    assert torch.equal(group.outputs(), before)
    mixed = start.with_layers(swapped, layers, 1)
    assert [rank.store._local_experts for rank in group.ranks] == [
        [mixed.local_experts(i, r) for i in range(L)] for r in range(2)
    ]
    assert {rank.store.version for rank in group.ranks} == {1}
    group.ranks[1].store._read = healthy  # the disk is back
    group.prepare(shuffled(start, 2, seed=1))
    assert [n.error for n in group.until_placed()] == ["", ""]
    assert torch.equal(group.outputs(), before)


def test_a_truncated_checkpoint_keeps_the_old_placement(group: Group) -> None:
    before = group.outputs()
    path = group.folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)
    group.prepare(shuffled(Placement.initial(L, E, 2, 2), 1, seed=2))
    notices = group.until_placed()
    assert "has changed since the start" in notices[0].error + notices[1].error
    assert torch.equal(group.outputs(), before)


def test_placements_wait_for_their_turn(group: Group) -> None:
    start = Placement.initial(L, E, 2, redundant=2)
    before = group.outputs()
    for version in (1, 2, 3):
        group.prepare(shuffled(start, version, seed=version))
    seen = [[n.version for n in group.until_placed()] for _ in range(3)]
    assert seen == [[1, 1], [2, 2], [3, 3]]
    assert torch.equal(group.outputs(), before)
    group.prepare(shuffled(start, 3, seed=4))
    assert all("is not newer than version" in n.error for n in group.until_placed())


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda t: {**t, "experts": t["experts"][:-4]}, "is damaged: cannot reshape"),
        (lambda t: {**t, "experts": bytes(len(t["experts"]))}, "lacks expert 1"),
        (lambda t: {**t, "num_ranks": 5, "experts_per_rank": 2}, "only a Join can change"),
        (
            lambda t: {
                **t,
                "num_experts": 7,
                "experts": np.tile(np.arange(10) % 7, L).astype("<i4").tobytes(),
            },
            "this model",
        ),
    ],
)
def test_a_placement_that_does_not_fit_is_given_up_by_all(
    group: Group, damage: Callable[[dict[str, Any]], dict[str, Any]], why: str
) -> None:
    good = shuffled(Placement.initial(L, E, 2, redundant=2), 1, seed=3).to_table()
    bad = PlacementTable(**damage({name: getattr(good, name) for name in good.__struct_fields__}))
    before = group.outputs()
    group.ranks[0].store.prepare(bad)
    group.ranks[1].store.prepare(good)
    notices = group.until_placed()
    assert why in notices[0].error
    assert notices[1].error == "another rank gave it up"
    assert torch.equal(group.outputs(), before)


def test_a_decision_is_carried_out_once_however_often_it_comes(group: Group) -> None:
    start = Placement.initial(L, E, 2, redundant=2)
    group.prepare(shuffled(start, 1, seed=1))
    group.until_placed()
    first = group.ranks[0].store.prepared
    assert first == 1 * (L + 1) + L
    for agreed in (first, L, 1, L + 1, -1, first):
        for rank in group.ranks:
            rank.store.commit(agreed)
    assert group.ranks[0].notices == []
    assert group.ranks[0].store.prepared == first
    for rank in group.ranks:
        rank.store.load_all(shuffled(start, 5, seed=2).to_table())
        rank.store.commit(-3)  # given up in an epoch that is over
        assert (rank.store.version, rank.store.prepared) == (5, 5 * (L + 1) + L)
    with pytest.raises(AssertionError, match="agreed on placement 7, newest here is 5"):
        group.ranks[0].store.commit(7 * (L + 1) + 1)


def test_ranks_learn_by_steps_alone_that_layers_differ(group: Group) -> None:
    """They do not learn it from a placement's message, which reaches ranks at different times.

    Recorded steps depend on it.
    """

    def mixed() -> set[bool]:
        return {rank.store.mixed for rank in group.ranks}

    start = Placement.initial(L, E, 2, redundant=2)
    seen = set()
    for version, heard in enumerate((group.ranks, group.ranks[:1]), start=1):
        target = shuffled(start, version, seed=version)
        for rank in heard:
            rank.store.prepare(target.to_table())
            while rank.store.prepared < version * (L + 1) + 1:
                time.sleep(0.001)
        assert mixed() == {False}
        if len(heard) == 2:
            group.until_placed(lambda: seen.update((tuple(sorted(mixed())),)))
    assert seen == {(False,), (True,)}
    group.step()
    assert mixed() == {False}


def test_load_all_goes_anywhere_from_anywhere(tmp_path: Path) -> None:
    write_experts(tmp_path, torch.float32, fused=False)
    start = Placement.initial(L, E, 2, redundant=2)
    group = Group(tmp_path, start)
    before = group.outputs()
    group.prepare(shuffled(start, 1, seed=1))
    deadline_s = time.monotonic() + 10
    while min(rank.store.prepared for rank in group.ranks) < L + 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    group.ranks[0].store.commit(L + 2)  # one layer active on one rank only
    current = start
    for version, ranks in enumerate((2, 4, 3, 1, 2), start=2):
        current = rescaled(current, ranks, 2, version)
        while len(group.ranks) > ranks:
            group.ranks.pop().store.close()
        for rank in group.ranks:
            rank.store.load_all(current.to_table())
        for number in range(len(group.ranks), ranks):
            group.ranks.append(group.rank(number, current))
        assert torch.equal(group.outputs(), before)
        assert all(
            len(layer.packed) == current.experts_per_rank
            for rank in group.ranks
            for layer in rank.layers
        )
        assert {rank.store.prepared for rank in group.ranks} == {version * (L + 1) + L}
    renumbered = group.ranks[::-1]
    for number, rank in enumerate(renumbered):
        rank.store.load_all(current.to_table(), rank=number)
    group.ranks = renumbered
    assert torch.equal(group.outputs(), before)
    group.prepare(shuffled(current, 9, seed=9))
    assert [n.error for n in group.until_placed()] == ["", ""]
    assert torch.equal(group.outputs(), before)
    group.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_that_keep_all_experts_in_one_tensor(group: Group, dtype: torch.dtype) -> None:
    kernel = GroupedMM(ops_of(dtype))
    files = group.reader()

    def packed(experts: list[int], layer: int) -> PackedGroupedMM:
        ones = [files.read(layer, expert) for expert in experts]
        weights = ExpertWeights(*(torch.stack(w).to(dtype) for w in zip(*ones, strict=True)))
        return kernel.pack(weights)

    start = Placement.initial(L, E, 2, redundant=2)
    router: Any = no_router
    layers = [
        MoELayer(
            router,
            LocalAll2All(5),
            kernel,
            packed(start.local_experts(i, 0), i),
            LogicalToPhysical(start, i),
        )
        for i in range(L)
    ]

    def read(layer: int, expert: int, work: Callable[[int], None]) -> tuple[Tensor, Tensor]:
        w13, w2 = files.read(layer, expert, work)
        return w13.to(dtype), w2.to(dtype)

    group.ranks = [Rank(ExpertStore(layers, read, 0, start), layers)]
    group.ranks[0].store.on_placement_result = group.ranks[0].notices.append
    target = shuffled(start, 1, seed=1)
    group.prepare(target)
    assert group.until_placed()[0].error == ""
    for placement in (target, rescaled(target, 4, 2, 2), rescaled(target, 2, 4, 3), start):
        group.ranks[0].store.load_all(placement.to_table())
        for index, layer in enumerate(layers):
            expected = packed(placement.local_experts(index, 0), index)
            for one, other in zip(layer.packed.parts, expected.parts, strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()


def test_load_all_of_a_broken_checkpoint_can_be_tried_again(group: Group) -> None:
    target = shuffled(Placement.initial(L, E, 2, redundant=2), 4, seed=4)
    before = group.outputs()
    healthy = group.ranks[0].store._read
    group.ranks[0].store._read = failing(healthy, 0)
    with pytest.raises(CheckpointError, match="Input/output error"):
        group.ranks[0].store.load_all(target.to_table())
    group.ranks[0].store._read = healthy
    for rank in group.ranks:
        rank.store.load_all(target.to_table())
    assert torch.equal(group.outputs(), before)
    with pytest.raises(ConfigError, match="this model has"):
        group.ranks[0].store.load_all(Placement.initial(L + 1, E, 2).to_table())


def test_closing_does_not_wait_for_what_is_on_its_way(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "BYTES_PER_S", 1.0)  # years
    store = group.ranks[0].store
    store.prepare(shuffled(Placement.initial(L, E, 2, redundant=2), 1, seed=1).to_table())
    time.sleep(0.02)
    began_s = time.monotonic()
    store.close()
    assert time.monotonic() - began_s < 15
    assert not store._thread.is_alive()


def test_the_background_keeps_to_its_share() -> None:
    work = Pace(threading.Event(), share=0.2, bytes_per_s=1e12)
    used_s = time.thread_time()
    began_s = time.monotonic()
    while time.thread_time() - used_s < 0.05:
        work(0)
        sum(range(20_000))
    assert (time.thread_time() - used_s) / (time.monotonic() - began_s) < 0.3
    began_s = time.monotonic()
    Pace(threading.Event(), share=1.0, bytes_per_s=1e6)(50_000)
    assert time.monotonic() - began_s >= 0.05
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Cancelled):
        Pace(cancelled, share=1.0, bytes_per_s=1e6)(0)


def test_torch_keeps_its_threads_for_others(group: Group) -> None:
    torch.set_num_threads(2)
    store = group.rank(0, Placement.initial(L, E, 2, redundant=2)).store
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    store.close()
    assert found == [torch.get_num_threads()] == [2]
