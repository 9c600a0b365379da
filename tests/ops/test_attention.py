"""Paged attention against a plain softmax over the real context, and bits that depend on query and
context alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.ops import attention as a
from moeserve.ops.inputs import HeadShape, from_entries, to_entries
from moeserve.ops.probe import host_step


@dataclass
class Cache:
    """Random contexts in scattered blocks; unused slots hold NaN.

    `keys` and `values` are the dequantized entries of an int8 cache.
    """

    k: Tensor
    v: Tensor
    tables: list[list[int]]
    block_size: int
    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class Rule:
    """The positions that a query sees, and changes of its scores."""

    window: int | None = None
    chunk: int | None = None
    soft_cap: float = 0.0
    sinks_H: Tensor | None = None

    def first(self, position: int) -> int:
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)


def make_cache(
    lengths: list[int],
    g: int,
    d: int,
    size: int,
    dtype: torch.dtype,
    seed: int = 0,
    v_dim: int = 0,
    latent: bool = False,
) -> Cache:
    """v_dim: 0 for d. latent: values are the first v_dim elements of keys, in their memory."""
    v_dim = v_dim or d
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // size) for n in lengths]
    free = (torch.randperm(sum(counts) + 3, generator=generator) + 1).tolist()
    k, v = (
        to_entries(torch.full((sum(counts) + 4, size, g, width), torch.nan), dtype)
        for width in (d, v_dim)
    )
    v = k[..., :v_dim] if latent else v
    tables = []
    keys = []
    values = []
    for length, count in zip(lengths, counts, strict=True):
        blocks = [free.pop() for _ in range(count)]
        own_k, own_v = (
            to_entries(torch.randn(length, g, x, generator=generator), dtype) for x in (d, v_dim)
        )
        own_v = own_k[..., :v_dim] if latent else own_v
        slots = torch.tensor([blocks[p // size] * size + p % size for p in range(length)])
        k.view(-1, *k.shape[2:])[slots] = own_k
        v.view(-1, *v.shape[2:])[slots] = own_v
        tables.append(blocks)
        keys.append(from_entries(own_k))
        values.append(from_entries(own_v))
    return Cache(k, v, tables, size, keys, values)


def query_type(cache_type: torch.dtype) -> torch.dtype:
    return torch.float32 if cache_type == torch.int8 else cache_type


def run(
    cache: Cache, rows: list[tuple[int, int, int]], q: list[Tensor], rule: Rule
) -> list[Tensor]:
    """rows: (context, first position, count); q[context] holds the queries of all its positions."""
    width = max(len(cache.tables[c]) for c, _, _ in rows)
    blocks = torch.tensor(
        [cache.tables[c] + [0] * (width - len(cache.tables[c])) for c, _, _ in rows]
    )
    counts = [count for _, _, count in rows]
    queries = torch.cat([q[c][s : s + n] for c, s, n in rows])
    starts = [s for _, s, _ in rows]
    offsets = [0, *itertools.accumulate(counts)]
    step = host_step(
        blocks, cache.block_size, starts, offsets, window=rule.window, chunk=rule.chunk
    )
    shape = HeadShape(
        queries.shape[1], cache.k.shape[2], queries.shape[2], cache.values[0].shape[2]
    )
    plan = a.plan_attention(*step, shape)
    padded = torch.cat((queries, queries.new_full((3, *queries.shape[1:]), 7)))
    out = a.attention(padded, cache.k, cache.v, plan, sinks_H=rule.sinks_H, soft_cap=rule.soft_cap)
    assert not out[len(queries) :].any()
    return list(out[: len(queries)].split(counts))


def plain(cache: Cache, context: int, q_THd: Tensor, rule: Rule) -> Tensor:
    """Softmax attention in double precision, query by query."""
    keys = cache.keys[context].double()
    values = cache.values[context].double()
    rows = []
    for position, query in enumerate(q_THd.double()):
        first = rule.first(position)
        k = keys[first : position + 1]
        v = values[first : position + 1]
        grouped = query.view(k.shape[1], -1, k.shape[2])
        scores = torch.einsum("ghd,tgd->ght", grouped, k)
        if rule.soft_cap:
            scores = rule.soft_cap * (scores / rule.soft_cap).tanh()
        if rule.sinks_H is not None:
            scores = torch.cat((scores, rule.sinks_H.double().view(*scores.shape[:2], 1)), -1)
        probs = scores.softmax(-1)[..., : len(k)]
        rows.append(torch.einsum("ght,tgd->ghd", probs, v).flatten())
    return torch.stack(rows)


SINKS = torch.tensor([0.5, -3.0, 4.0, -torch.inf, 30.0, 1.0])
CASES = [  # heads, KV heads, widths of keys and values, block size, rule
    (4, 2, 64, 64, 16, Rule()),
    (8, 1, 16, 16, 16, Rule()),
    (3, 3, 8, 8, 4, Rule()),
    (6, 2, 40, 40, 48, Rule()),
    (4, 2, 128, 128, 128, Rule()),
    (4, 2, 32, 32, 16, Rule(window=1)),
    (4, 2, 32, 32, 16, Rule(window=70)),
    (4, 2, 32, 32, 48, Rule(window=64)),
    (4, 2, 192, 128, 16, Rule(window=70, sinks_H=SINKS[:4])),
    (4, 2, 8, 24, 16, Rule(soft_cap=1.5)),
    (6, 2, 16, 16, 16, Rule(sinks_H=SINKS, soft_cap=2.0)),
    (4, 2, 32, 32, 16, Rule(chunk=80)),
    (4, 2, 32, 32, 16, Rule(chunk=7)),
    (4, 2, 32, 16, 48, Rule(chunk=64, window=40, sinks_H=SINKS[:4])),
]
LATENT_CASES = [
    (4, 1, 40, 32, 16, Rule()),
    (3, 1, 576, 512, 16, Rule()),
    (16, 1, 72, 64, 48, Rule(window=70)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("h", "g", "d", "v", "size", "rule"), CASES + LATENT_CASES)
def test_agrees_with_plain_attention_in_any_packing(
    h: int, g: int, d: int, v: int, size: int, rule: Rule, dtype: torch.dtype
) -> None:
    """Whole contexts at once, then every position again in random company: same bits as the first
    time.
    """
    lengths = [200, 1, 64, 65, 131]
    latent = (h, g, d, v, size, rule) in LATENT_CASES
    if latent and dtype == torch.int8:
        pytest.skip("a part of an int8 entry has no scale")
    cache = make_cache(lengths, g, d, size, dtype, v_dim=v, latent=latent)
    generator = torch.Generator().manual_seed(9)
    q = [
        (torch.randn(n, h, d, generator=generator) * d**-0.5).to(query_type(dtype)) for n in lengths
    ]
    whole = run(cache, [(c, 0, n) for c, n in enumerate(lengths)], q, rule)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6
    for context, found in enumerate(whole):
        expected = plain(cache, context, q[context], rule)
        assert (found.double() - expected).abs().max() < tolerance
    rng = np.random.default_rng(4)
    for _ in range(25):
        rows = []
        for context in rng.permutation(len(lengths))[: rng.integers(1, 6)].tolist():
            start = int(rng.integers(0, lengths[context]))
            rows.append((context, start, int(rng.choice([1, 1, 3, 9, 70]))))
        rows = [(c, s, min(n, lengths[c] - s)) for c, s, n in rows]
        for (context, start, count), found in zip(rows, run(cache, rows, q, rule), strict=True):
            assert torch.equal(found, whole[context][start : start + count]), (
                context,
                start,
                count,
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("bounds", [(1 << 20, 1 << 21), (1 << 13, 1 << 11)])
def test_bounds_on_work_space_do_not_change_bits(
    bounds: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small bounds split rows, heads and contexts; the largest temporary stays near them."""
    lengths = [700, 90, 300]
    cache = make_cache(lengths, 4, 32, 16, dtype)
    q = [
        torch.randn(n, 8, 32, generator=torch.Generator().manual_seed(n)).to(query_type(dtype))
        for n in lengths
    ]
    rows = [(0, 600, 100), (1, 89, 1), (2, 299, 1)]
    rule = Rule(sinks_H=torch.randn(8), soft_cap=3.0)
    expected = run(cache, rows, q, rule)
    monkeypatch.setattr(a, "MAX_SCORES", bounds[0])
    monkeypatch.setattr(a, "MAX_CONTEXT_ELEMENTS", bounds[1])
    for found, wanted in zip(run(cache, rows, q, rule), expected, strict=True):
        assert torch.equal(found, wanted)


def test_sixteen_thousand_tokens_of_context() -> None:
    """A decode and the end of a prompt run beside short rows."""
    lengths = [16_384, 40]
    cache = make_cache(lengths, 2, 64, 16, torch.bfloat16)
    q = [
        torch.randn(n, 4, 64, generator=torch.Generator().manual_seed(n)).bfloat16() / 8
        for n in lengths
    ]
    chunk = run(cache, [(0, 16_300, 84), (1, 0, 40)], q, Rule())
    last, short = run(cache, [(0, 16_383, 1), (1, 39, 1)], q, Rule())
    assert torch.equal(last[0], chunk[0][-1])
    assert torch.equal(short[0], chunk[1][-1])
    query = q[0][-1].double().view(2, 2, 64)
    probs = torch.einsum("ghd,tgd->ght", query, cache.keys[0].double()).softmax(-1)
    expected = torch.einsum("ght,tgd->ghd", probs, cache.values[0].double()).flatten()
    assert (last[0].double() - expected).norm() / expected.norm() < 0.01


def test_bfloat16_scores_keep_more_than_bfloat16() -> None:
    q = torch.randn(2, 8, 64).bfloat16() * 6
    k = torch.randn(2, 128, 64).bfloat16() * 6
    exact = q.double() @ k.double().transpose(1, 2)
    assert (a._scores(q, k) - exact).abs().max() / exact.abs().max() < 2e-5
    assert (torch.bmm(q, k.transpose(1, 2)) - exact).abs().max() / exact.abs().max() > 5e-4


def test_few_padded_sizes() -> None:
    sizes = [a._rounded_tiles(n) for n in range(1, 2000)]
    assert all(n <= size <= 1.25 * n + 1 for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 50


def test_a_step_without_tokens() -> None:
    plan = a.plan_attention(
        *host_step(torch.zeros((0, 1), dtype=torch.int64), 16, [], [0]), HeadShape(4, 2, 16, 16)
    )
    cache = torch.zeros(2, 16, 2, 16)
    assert not a.attention(torch.ones(1, 4, 16), cache, cache.clone(), plan).any()
