"""CUDA graphs in a group: which steps are replayed, in which shape, and when graphs are dropped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.config import config_of
from moeserve.engine.plan import BlockDiff, StepDecision, StepPlan
from moeserve.moe.layer import FusedMoELayer
from moeserve.moe.ubatch import UBatch
from moeserve.ops import triton_ops
from moeserve.runner.graphs import GroupGraphs, Mode, common_sizes
from tests.runner.harness import spec_of
from tests.runner.test_graphs import LIMITS, SETTINGS, SPEC, ByTriton, Nothing


@dataclass
class Facts:
    topology: tuple[int, int] = (1, 0)
    mixed: bool = False
    max_recordable_tokens: int = 1 << 40


def plan(*counts: int, decision: StepDecision | None) -> StepPlan:
    rows = np.arange(len(counts), dtype=np.int32)
    nothing = np.zeros(0, dtype=np.int32)
    diffs = (BlockDiff(nothing, nothing, nothing),)
    return StepPlan(
        0,
        rows,
        rows,
        np.array(counts, dtype=np.int32),
        np.ones(len(counts), np.bool_),
        diffs,
        decision=decision,
    )


def graphs_of(facts: Facts, asked: str = "auto") -> GroupGraphs:
    nothing: Any = Nothing()
    graphs = GroupGraphs(nothing, nothing, nothing, [UBatch()], common_sizes(asked, LIMITS), facts)
    assert graphs.shape(plan(1, decision=StepDecision(0, most_tokens=(1, 0)))) is None, (
        "the first one warms kernels"
    )
    return graphs


def test_a_step_has_the_size_of_the_rank_with_most_tokens() -> None:
    graphs = graphs_of(Facts())
    for counts, most, mode, tokens in (
        ((1, 1), 2, Mode.FULL, 2),
        ((1, 1), 100, Mode.FULL, 104),
        ((1, 1), 297, Mode.PIECEWISE, 304),
        ((1, 1), 301, Mode.PIECEWISE, 304),
        ((1, 7), 9, Mode.PIECEWISE, 16),
        ((1, 1), 513, None, 0),
        ((1, 7), 2000, None, 0),
    ):
        shape = graphs.shape(plan(*counts, decision=StepDecision(1, most_tokens=(most, 0))))
        assert ((shape.mode, shape.num_tokens) if shape else (None, 0)) == (mode, tokens), (
            counts,
            most,
        )


def test_what_cannot_be_replayed_runs_as_it_is() -> None:
    decision = StepDecision(1, most_tokens=(4, 0))
    assert graphs_of(Facts()).shape(plan(1, decision=None)) is None
    assert (
        graphs_of(Facts(), "piecewise").shape(plan(1, decision=StepDecision(1, 2, (4, 4)))) is None
    )
    assert graphs_of(Facts()).shape(plan(1, 2, decision=StepDecision(1, 2, (4, 4)))) is None
    assert (
        graphs_of(Facts(max_recordable_tokens=3)).shape(
            plan(1, decision=StepDecision(1, 2, (4, 4)))
        )
        is None
    )
    assert graphs_of(Facts(mixed=True)).shape(plan(1, decision=decision)) is None
    assert graphs_of(Facts(max_recordable_tokens=0)).shape(plan(1, decision=decision)) is None


def test_two_micro_batches_are_halves_and_all_ranks_make_room_for_the_same() -> None:
    graphs = graphs_of(Facts())
    for tokens, most, size, room in (
        (1, 1, 2, 1),
        (3, 2, 4, 2),
        (9, 5, 16, 8),
        (9, 30, 64, 32),
        (17, 9, 24, 16),
    ):
        shape = graphs.shape(plan(*(1,) * tokens, decision=StepDecision(1, 2, (most, most - 1))))
        assert shape is not None
        assert (shape.mode, shape.num_tokens, shape.padded_ubatch_tokens) == (Mode.FULL, size, room)
        assert shape.num_tokens - shape.split_at <= shape.split_at <= room == graphs.round_up(most)
    for most in range(1, 513):
        for tokens in {1, most, 2 * most - 1, 2 * most}:
            shape = graphs.shape(plan(*(1,) * tokens, decision=StepDecision(1, 2, (most, most))))
            assert (shape is not None) == (tokens <= 288), (
                most,
                tokens,
            )  # the largest size of FULL
            if shape is not None:
                assert tokens <= shape.num_tokens <= 288
                assert shape.split_at <= shape.padded_ubatch_tokens == graphs.round_up(most)


@pytest.mark.parametrize("seqs", [1, 256, 512])
@pytest.mark.parametrize("tokens", [20, 500, 2048])
def test_the_number_of_recordings_is_bounded(seqs: int, tokens: int) -> None:
    """This holds for any load, as docs/gpu.md says."""
    limits = replace(LIMITS, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    graphs = graphs_of(Facts())
    graphs.sizes = common_sizes("auto", limits)
    one = set[Any]()
    two = set[Any]()
    for most in range(1, min(tokens, 512) + 1):
        for counts in ((1,), (2,), (1,) * most):
            one.add(graphs.shape(plan(*counts, decision=StepDecision(1, 1, (most, 0)))))
            two.add(graphs.shape(plan(*counts, decision=StepDecision(1, 2, (most, most)))))
    assert len(one - {None}) <= 102
    assert len(two - {None}) <= 66


def test_all_ranks_make_room_for_the_same_number_whatever_they_do() -> None:
    for asked in ("auto", "full", "piecewise"):
        graphs = graphs_of(Facts(), asked)
        for most in (1, 3, 100, 299, 301, 512, 513, 2000):
            room = graphs.round_up(most)
            assert room >= most
            assert room == graphs_of(Facts(max_recordable_tokens=0), asked).round_up(most)
            for counts in ((1,), (2,), (1,) * min(most, 300)):
                shape = graphs.shape(plan(*counts, decision=StepDecision(1, most_tokens=(most, 0))))
                assert shape is None or shape.num_tokens == room


def test_recordings_go_with_the_group_and_the_placement() -> None:
    facts = Facts()
    graphs = graphs_of(facts)
    step = plan(1, decision=StepDecision(1, most_tokens=(1, 0)))
    for topology in ((1, 0), (2, 0), (2, 3)):
        if facts.topology != topology:
            facts.topology = topology
            assert graphs.shape(step) is None
            assert not graphs._recordings
        shape = graphs.shape(step)
        assert shape is not None
        assert shape.mode is Mode.FULL
        graphs._recordings[shape] = None  # type: ignore[assignment]


def test_nothing_is_left_to_be_compiled_while_a_step_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router of a recorded step learns the number of tokens from the device, by a kernel of its
    own.
    """
    real = triton_ops.route
    on_device = []

    def route(*args: Any) -> Any:
        on_device.append(isinstance(args[-1], torch.Tensor))
        return real(*args)

    monkeypatch.setattr(triton_ops, "route", route)
    monkeypatch.setattr(FusedMoELayer, "why_not_recordable", None)
    runner = ByTriton(
        config_of(None, graphs="full", **SETTINGS), spec_of(**SPEC), Path(), grouped=True
    )
    runner.prepare()
    assert isinstance(runner.graphs, GroupGraphs)
    assert not runner.graphs._recordings
    assert any(on_device)
    runner.close()
