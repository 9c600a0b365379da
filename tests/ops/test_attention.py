"""Paged attention against a plain softmax over the real context, and bits that depend on query and context alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.ops import attention as a
from moeserve.ops.inputs import entry_width, from_entries, to_entries
from moeserve.ops.probe import host_step


@dataclass
class Cache:
    """Random contexts in scattered blocks; every slot that belongs to nobody holds NaN. keys, values: what int8 ones
    stand for."""

    k: Tensor
    v: Tensor
    tables: list[list[int]]
    block_size: int
    keys: list[Tensor]
    values: list[Tensor]


def make_cache(lengths: list[int], g: int, d: int, size: int, dtype: torch.dtype, seed: int = 0) -> Cache:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // size) for n in lengths]
    width = entry_width(d, dtype)
    free = (torch.randperm(sum(counts) + 3, generator=generator) + 1).tolist()
    k = to_entries(torch.full((sum(counts) + 4, size, g, d), torch.nan), dtype)
    v = k.clone()
    tables, keys, values = [], [], []
    for length, count in zip(lengths, counts, strict=True):
        blocks = [free.pop() for _ in range(count)]
        own_k, own_v = (to_entries(torch.randn(length, g, d, generator=generator), dtype) for _ in range(2))
        slots = torch.tensor([blocks[p // size] * size + p % size for p in range(length)])
        k.view(-1, g, width)[slots] = own_k
        v.view(-1, g, width)[slots] = own_v
        tables.append(blocks)
        keys.append(from_entries(own_k))
        values.append(from_entries(own_v))
    return Cache(k, v, tables, size, keys, values)


def query_type(cache_type: torch.dtype) -> torch.dtype:
    return torch.float32 if cache_type == torch.int8 else cache_type


def run(cache: Cache, rows: list[tuple[int, int, int]], q: list[Tensor], window: int | None) -> list[Tensor]:
    """rows: (context, first position, count); q[context] holds the queries of all its positions."""
    width = max(len(cache.tables[c]) for c, _, _ in rows)
    blocks = torch.tensor([cache.tables[c] + [0] * (width - len(cache.tables[c])) for c, _, _ in rows])
    counts = [count for _, _, count in rows]
    queries = torch.cat([q[c][s : s + n] for c, s, n in rows])
    g, d = cache.k.shape[2], queries.shape[2]
    plan = a.plan_attention(
        *host_step(blocks, cache.block_size, [s for _, s, _ in rows], [0, *itertools.accumulate(counts)], window),
        queries.shape[1],
        g,
        d,
    )
    padded = torch.cat((queries, queries.new_full((3, *queries.shape[1:]), 7)))
    out = a.attention(padded, cache.k, cache.v, plan)
    assert not out[len(queries) :].any()
    return list(out[: len(queries)].split(counts))


def plain(cache: Cache, context: int, q_THd: Tensor, window: int | None) -> Tensor:
    """Softmax attention in double precision, query by query."""
    keys, values = cache.keys[context].double(), cache.values[context].double()
    rows = []
    for position, query in enumerate(q_THd.double()):
        first = 0 if window is None else max(0, position - window + 1)
        k, v = keys[first : position + 1], values[first : position + 1]
        grouped = query.view(k.shape[1], -1, k.shape[2])
        probs = torch.einsum("ghd,tgd->ght", grouped, k).softmax(-1)
        rows.append(torch.einsum("ght,tgd->ghd", probs, v).flatten())
    return torch.stack(rows)


CASES = [  # heads, KV heads, head width, block size, window
    (4, 2, 64, 16, None),
    (8, 1, 16, 16, None),
    (3, 3, 8, 4, None),
    (6, 2, 40, 48, None),
    (4, 2, 128, 128, None),
    (4, 2, 32, 16, 1),
    (4, 2, 32, 16, 70),
    (4, 2, 32, 48, 64),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("h", "g", "d", "size", "window"), CASES)
def test_agrees_with_plain_attention_in_any_packing(
    h: int, g: int, d: int, size: int, window: int | None, dtype: torch.dtype
) -> None:
    """Whole contexts at once, then every position again in random company: same bits as the first time."""
    lengths = [200, 1, 64, 65, 131]
    cache = make_cache(lengths, g, d, size, dtype)
    generator = torch.Generator().manual_seed(9)
    q = [(torch.randn(n, h, d, generator=generator) * d**-0.5).to(query_type(dtype)) for n in lengths]
    whole = run(cache, [(c, 0, n) for c, n in enumerate(lengths)], q, window)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6
    for context, found in enumerate(whole):
        expected = plain(cache, context, q[context], window)
        assert (found.double() - expected).abs().max() < tolerance
    rng = np.random.default_rng(4)
    for _ in range(25):
        rows = []
        for context in rng.permutation(len(lengths))[: rng.integers(1, 6)].tolist():
            start = int(rng.integers(0, lengths[context]))
            rows.append((context, start, int(rng.choice([1, 1, 3, 9, 70]))))
        rows = [(c, s, min(n, lengths[c] - s)) for c, s, n in rows]
        for (context, start, count), found in zip(rows, run(cache, rows, q, window), strict=True):
            assert torch.equal(found, whole[context][start : start + count]), (context, start, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("bounds", [(1 << 20, 1 << 21), (1 << 13, 1 << 11)])
def test_bounds_on_work_space_do_not_change_bits(
    bounds: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small bounds split rows, heads and contexts; the largest temporary stays near them."""
    lengths = [700, 90, 300]
    cache = make_cache(lengths, 4, 32, 16, dtype)
    q = [torch.randn(n, 8, 32, generator=torch.Generator().manual_seed(n)).to(query_type(dtype)) for n in lengths]
    rows = [(0, 600, 100), (1, 89, 1), (2, 299, 1)]
    expected = run(cache, rows, q, None)
    monkeypatch.setattr(a, "SCORES", bounds[0])
    monkeypatch.setattr(a, "CONTEXT", bounds[1])
    for found, wanted in zip(run(cache, rows, q, None), expected, strict=True):
        assert torch.equal(found, wanted)


def test_sixteen_thousand_tokens_of_context() -> None:
    """A decode row and the end of a prompt beside short rows."""
    lengths = [16_384, 40]
    cache = make_cache(lengths, 2, 64, 16, torch.bfloat16)
    q = [torch.randn(n, 4, 64, generator=torch.Generator().manual_seed(n)).bfloat16() / 8 for n in lengths]
    chunk = run(cache, [(0, 16_300, 84), (1, 0, 40)], q, None)
    last, short = run(cache, [(0, 16_383, 1), (1, 39, 1)], q, None)
    assert torch.equal(last[0], chunk[0][-1])
    assert torch.equal(short[0], chunk[1][-1])
    query = q[0][-1].double().view(2, 2, 64)
    probs = torch.einsum("ghd,tgd->ght", query, cache.keys[0].double()).softmax(-1)
    expected = torch.einsum("ght,tgd->ghd", probs, cache.values[0].double()).flatten()
    assert (last[0].double() - expected).norm() / expected.norm() < 0.01


def test_bfloat16_scores_keep_more_than_bfloat16() -> None:
    q, k = torch.randn(2, 8, 64).bfloat16() * 6, torch.randn(2, 128, 64).bfloat16() * 6
    exact = q.double() @ k.double().transpose(1, 2)
    assert (a._scores(q, k) - exact).abs().max() / exact.abs().max() < 2e-5
    assert (torch.bmm(q, k.transpose(1, 2)) - exact).abs().max() / exact.abs().max() > 5e-4


def test_few_padded_sizes() -> None:
    sizes = [a._bucket(n) for n in range(1, 2000)]
    assert all(n <= size <= 1.25 * n + 1 for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 50


def test_a_step_without_tokens() -> None:
    plan = a.plan_attention(*host_step(torch.zeros((0, 1), dtype=torch.int64), 16, [], [0]), 4, 2, 16)
    cache = torch.zeros(2, 16, 2, 16)
    assert not a.attention(torch.ones(1, 4, 16), cache, cache.clone(), plan).any()
