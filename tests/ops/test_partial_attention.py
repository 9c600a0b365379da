"""Attention to one cut of a context, and the merge of cuts in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeserve.ops import attention as a
from moeserve.ops.attention import Partial, attention_partial, cuts_of, merge_partials
from moeserve.ops.inputs import HeadShape
from moeserve.ops.probe import host_step

NOTHING = -torch.inf


def values(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def result(total: Partial) -> Tensor:
    return total.values / total.exp_sum[:, :, None]


def same(a: Partial, b: Partial) -> bool:
    return all(map(torch.equal, a, b))


def test_cuts_have_absolute_borders() -> None:
    assert cuts_of(0, 1088) == ((0, 512), (512, 1024), (1024, 1088))
    assert cuts_of(448, 192) == ((0, 64), (64, 192))
    assert cuts_of(64, 64) == ((0, 64),)
    for start in range(0, a.CONTEXT_CUT, a.TILE):
        for length in range(a.TILE, 3 * a.CONTEXT_CUT, 5 * a.TILE):
            cuts = cuts_of(start, length)
            assert [cuts[0][0], *(end for _, end in cuts)][-1] == length
            assert all((start + first) % a.CONTEXT_CUT == 0 for first, _ in cuts[1:])
            assert all(0 < end - first <= a.CONTEXT_CUT for first, end in cuts)


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_cuts_in_order_are_a_softmax_over_all(scale: float, soft_cap: float) -> None:
    q, k, v = (
        values(2, 8, 32, seed=1, scale=scale),
        values(2, 1152, 32, seed=2),
        values(2, 1152, 16),
    )
    total: Partial | None = None
    for first, end in cuts_of(0, 1152):
        part = attention_partial(q, k[:, first:end], v[:, first:end], None, 1, soft_cap)
        total = part if total is None else merge_partials(total, part)
    assert total is not None
    scores = q.double() @ k.double().transpose(1, 2)
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    expected = scores.softmax(-1) @ v.double()
    tolerance = 1e-5 if scale == 1.0 else 2e-3
    torch.testing.assert_close(result(total).double(), expected, rtol=tolerance, atol=tolerance)


def test_one_token_is_its_value() -> None:
    q, k, v = values(1, 8, 16, seed=3), values(1, 64, 16, seed=4), values(1, 64, 16, seed=5)
    hidden = torch.ones(1, 8, 64, dtype=torch.bool)
    hidden[:, :, 7] = False
    part = attention_partial(q, k, v, hidden, 1)
    torch.testing.assert_close(part.largest, (q @ k.transpose(1, 2))[:, :, 7])
    assert torch.equal(part.exp_sum, torch.ones(1, 8))
    assert torch.equal(part.values, v[:, 7:8].expand(-1, 8, -1))


def test_a_cut_that_nobody_sees_changes_nothing() -> None:
    q, k, v = values(2, 8, 16, seed=6), values(2, 128, 16, seed=7), values(2, 128, 16, seed=8)
    seen = attention_partial(q, k, v, None, 1)
    empty = attention_partial(q, k, v, torch.ones(2, 8, 128, dtype=torch.bool), 1)
    assert (empty.largest == NOTHING).all()
    assert not empty.exp_sum.any()
    assert not empty.values.any()
    assert same(merge_partials(seen, empty), seen)
    assert same(merge_partials(empty, seen), seen)
    assert same(merge_partials(empty, empty), empty)


def test_a_score_of_minus_infinity_has_no_weight() -> None:
    q, k, v = values(1, 8, 16, seed=9), values(1, 64, 16, seed=10), values(1, 64, 16, seed=11)
    k[:, 3] = 0
    k[:, 3, 0] = -torch.inf
    q[:, :, 0] = 1.0
    part = attention_partial(q, k, v, None, 1)
    hidden = torch.zeros(1, 8, 64, dtype=torch.bool)
    hidden[:, :, 3] = True
    k[:, 3] = 0
    assert same(part, attention_partial(q, k, v, hidden, 1))


def test_a_value_that_is_no_number_shows() -> None:
    q, k, v = values(1, 8, 16, seed=12), values(1, 64, 16, seed=13), values(1, 64, 16, seed=14)
    k[:, 5] = torch.nan
    broken = attention_partial(q, k, v, None, 1)
    fine = attention_partial(q, values(1, 64, 16, seed=15), v, None, 1)
    for total in (merge_partials(fine, broken), merge_partials(broken, fine)):
        assert result(total).isnan().all()


@pytest.mark.parametrize("window", [None, 100, 700])
def test_a_query_has_its_bits_in_any_step(window: int | None) -> None:
    """Contexts that end in different cuts, windows that begin anywhere in one."""
    shape = HeadShape(4, 2, 32, 32)
    size = 64
    lengths = [1, 64, 511, 512, 513, 1025, 1400]
    blocks = torch.arange(1, 1 + 7 * 22).view(7, 22)
    k, v = values(160, size, 2, 32, seed=16), values(160, size, 2, 32, seed=17)
    q = values(7, 4, 32, seed=18)
    starts = [length - 1 for length in lengths]
    together = a.attention(
        q,
        k,
        v,
        a.plan_attention(*host_step(blocks, size, starts, list(range(8)), window=window), shape),
    )
    for row in range(7):
        one = host_step(blocks[row : row + 1], size, starts[row : row + 1], [0, 1], window=window)
        alone = a.attention(q[row : row + 1], k, v, a.plan_attention(*one, shape))
        assert torch.equal(alone[0], together[row]), lengths[row]
