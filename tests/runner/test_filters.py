"""Filters and the argmax against their definitions, on rows with ties, infinities and odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from moeserve.ops import native_rows
from moeserve.runner.sampling.native import HEAD_BLOCKS, can_narrow, narrow, top_p_cutoff_head
from moeserve.runner.sampling.noise import LANES, padded
from moeserve.runner.sampling.reference import keep_min_p, keep_top_k, keep_top_p, top_p_cutoff
from moeserve.runner.sampling.rules import NEG_INF

Cutoff = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def hostile_rows(rows: int, width: int, seed: int) -> torch.Tensor:
    """Rows with many ties (values in quarters), some -inf, maximum 0."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, width)) * 3).round(0) / 4
    values[rng.random((rows, width)) < 0.2] = -np.inf
    values[0] = 0.0
    values[-1, 1:] = -np.inf
    values[-1, 0] = 0.0
    values -= values.max(axis=1, keepdims=True)
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("argmax", [native_rows.argmax, lambda x: x.max(dim=-1)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [1, 7, 64, 1000, 49_155, 151_936])
def test_the_lowest_id_wins_an_argmax(width: int, threads: int, argmax: Argmax) -> None:
    torch.set_num_threads(threads)
    rng = np.random.default_rng(width)
    x = torch.from_numpy(rng.integers(0, 3, (5, width)).astype(np.float32))
    x[1] = NEG_INF
    x[2, width // 2] = float("nan")
    x[3, width - 1] = 9.0
    peak, index = argmax(x)
    expected = [int(np.argmax(row)) for row in x.numpy()]  # numpy: first maximum, NaN largest
    assert index.tolist() == expected
    assert torch.equal(
        peak.nan_to_num(7.5), x.gather(1, index.unsqueeze(1)).squeeze(1).nan_to_num(7.5)
    )
    for row in range(5):
        assert argmax(x[row : row + 1])[1].item() == expected[row]


@pytest.mark.parametrize("seed", range(4))
def test_top_k_keeps_every_tie_at_the_cut(seed: int) -> None:
    x = hostile_rows(6, 200, seed)
    k = torch.tensor([1, 3, 10, 50, 200, 5])
    kept = x.clone()
    keep_top_k(kept, k, 50)
    for row, original, limit in zip(kept, x, k.tolist(), strict=True):
        cut = sorted(original.tolist(), reverse=True)[limit - 1]
        expected = [v if v >= cut or limit > 50 else NEG_INF for v in original.tolist()]
        assert row.tolist() == expected


@pytest.mark.parametrize("seed", range(4))
def test_min_p_is_relative_to_the_likeliest(seed: int) -> None:
    x = hostile_rows(4, 100, seed)
    min_p = np.array([0.5, 0.0, 1.0, 0.2], dtype=np.float32)
    with np.errstate(divide="ignore"):
        kept = x.clone()
        keep_min_p(kept, torch.from_numpy(np.log(min_p)))
    for row, original, p in zip(kept, x, min_p.tolist(), strict=True):
        probs = original.double().exp()
        expected = torch.where(probs >= p * 0.999999, original, NEG_INF)
        assert torch.equal(row, expected)


@pytest.mark.parametrize("cutoff", [top_p_cutoff, top_p_cutoff_head])
@pytest.mark.parametrize("seed", range(4))
def test_top_p_keeps_the_fewest_tokens_that_reach_it(seed: int, cutoff: Cutoff) -> None:
    x = hostile_rows(6, 300, seed)
    top_p = [0.1, 0.5, 0.9, 0.99, 1.0, 0.3]
    kept = x.clone()
    keep_top_p(kept, torch.tensor(top_p), cutoff)
    for row, original, p in zip(kept, x, top_p, strict=True):
        probs = original.double().softmax(0)
        cut = 0.0
        if p < 1:
            total = 0.0
            for value in sorted(probs.tolist(), reverse=True):
                cut = value
                total += value
                if total >= p * (1 + 1e-6):
                    break
        kept_naively = probs >= cut * (1 - 1e-6)
        assert torch.equal(row == original, kept_naively | (original == NEG_INF))
        assert (row > NEG_INF).any()


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9, 0.95, 0.999, 0.99999])
def test_sorting_less_gives_the_same_cut(p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for width in (50, 640, 5_000, 50_048):
        scales = torch.tensor([0.0, 0.1, 2.0, 8.0, 100.0]).unsqueeze(1)
        probs = (torch.randn(5, width, generator=generator) * scales).softmax(-1)
        top_p = torch.full((5,), p)
        cutoff = top_p_cutoff_head(probs, top_p)
        assert torch.equal(cutoff, top_p_cutoff(probs, top_p))
        assert torch.equal(cutoff[2:4], top_p_cutoff_head(probs[2:4], top_p[2:4]))


def test_a_narrowed_row_holds_everything_above_its_floor() -> None:
    rng = np.random.default_rng(2)
    width = 2 * HEAD_BLOCKS * LANES + LANES
    assert can_narrow(width)
    assert not can_narrow(width - LANES)
    x = torch.from_numpy(rng.normal(0, 3, (4, width)).round(1).astype(np.float32))
    x[1, 500:600] = 50.0
    x[2] = x[2].clamp(max=6.0)
    x[2, ::64] = 7.0  # the largest value once in every block: none of them is above the floor
    x[3] = NEG_INF
    narrowed, blocks, floor = narrow(x)
    ids = (blocks.unsqueeze(-1) * LANES + torch.arange(LANES)).view(4, -1)
    for row in range(4):
        expected = (x[row] > floor[row]).nonzero().squeeze(1)
        kept = ids[row][narrowed[row] > NEG_INF]
        assert kept.tolist() == expected.tolist()
        assert torch.equal(narrowed[row][narrowed[row] > NEG_INF], x[row][expected])
    assert not (x[2] > floor[2]).any()


def test_a_width_is_padded_to_whole_vectors() -> None:
    assert [padded(n) for n in (1, 64, 65, 151_936)] == [64, 64, 128, 151_936]
