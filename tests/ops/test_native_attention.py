"""The native attention: the reference's bits for every shape, company, thread count and instruction
set.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.ops import attention as torch_attention
from moeserve.ops import native_layer
from moeserve.ops.elementwise import write_kv
from moeserve.ops.inputs import HeadShape, to_entries
from moeserve.ops.probe import host_step
from tests.ops.isas import ISAS, MODULE, needs_native
from tests.ops.test_attention import Cache, Rule, make_cache, query_type

pytestmark = [needs_native, pytest.mark.usefixtures("usual_native")]

Row = tuple[int, int, int]  # context, first position, count


def step(
    cache: Cache, rows: list[Row], q: list[Tensor], rule: Rule
) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the step's queries and the inputs of plans.

    The queries are a slice of other data, with three rows of padding.
    """
    width = max(len(cache.tables[c]) for c, _, _ in rows)
    blocks = torch.tensor(
        [cache.tables[c] + [0] * (width - len(cache.tables[c])) for c, _, _ in rows]
    )
    counts = [count for _, _, count in rows]
    queries = torch.cat([q[c][s : s + n] for c, s, n in rows])
    apart = queries.new_full((len(queries) + 3, queries.shape[1] + 1, queries.shape[2]), 7)
    apart[: len(queries), :-1] = queries
    starts = [s for _, s, _ in rows]
    offsets = [0, *itertools.accumulate(counts)]
    shape = HeadShape(
        queries.shape[1], cache.k.shape[2], queries.shape[2], cache.values[0].shape[2]
    )
    return apart[:, :-1], (
        *host_step(blocks, cache.block_size, starts, offsets, window=rule.window, chunk=rule.chunk),
        shape,
    )


def run(cache: Cache, rows: list[Row], q: list[Tensor], rule: Rule) -> list[Tensor]:
    queries, args = step(cache, rows, q, rule)
    plan = native_layer.plan_attention(*args)
    out = native_layer.attention(
        queries, cache.k, cache.v, plan, sinks_H=rule.sinks_H, soft_cap=rule.soft_cap
    )
    assert not out[plan.num_tokens :].any()
    return list(out[: plan.num_tokens].split([count for _, _, count in rows]))


def reference(cache: Cache, row: Row, q: list[Tensor], rule: Rule) -> Tensor:
    """The result of the scalar specification in fp32 for the first query of a row."""
    queries, args = step(cache, [row], q, rule)
    plan = native_layer.plan_attention(*args)
    single = queries.float()
    kind = MODULE.Type.int8 if cache.k.dtype == torch.int8 else MODULE.Type.float32
    k, v = (x if x.dtype == torch.int8 else x.float().contiguous() for x in (cache.k, cache.v))
    out = torch.empty(queries.shape[1] * plan.shape.v_dim)
    sinks = 0 if rule.sinks_H is None else rule.sinks_H.data_ptr()
    plan.pieces.reference(
        0,
        0,
        row[1],
        single.data_ptr(),
        single.stride(0),
        k.data_ptr(),
        k.shape[3] * k.itemsize,
        v.data_ptr(),
        v.shape[3] * v.itemsize,
        kind,
        out.data_ptr(),
        rule.soft_cap,
        sinks,
    )
    return out


def make_queries(lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [
        (torch.randn(n, heads, dim, generator=generator) * 2 * dim**-0.5).to(dtype) for n in lengths
    ]


def cut(length: int, start: int, count: int) -> tuple[int, int]:
    return start, min(count, length - start)


SINKS = torch.tensor([0.5, -3.0, 4.0, 30.0])
CASES = [  # heads, KV heads, widths of keys and values, block size, rule
    (4, 2, 64, 64, 16, Rule()),
    (8, 1, 8, 8, 16, Rule()),
    (17, 1, 64, 64, 16, Rule()),
    (3, 3, 24, 24, 5, Rule()),
    (7, 1, 80, 80, 48, Rule()),
    (8, 2, 128, 128, 128, Rule()),
    (2, 2, 256, 256, 16, Rule()),
    (4, 2, 64, 64, 16, Rule(window=1)),
    (4, 2, 24, 24, 7, Rule(window=63)),
    (8, 2, 16, 16, 48, Rule(window=64)),
    (4, 1, 80, 80, 16, Rule(window=100)),
    (4, 2, 24, 8, 16, Rule(window=70, sinks_H=SINKS)),
    (4, 2, 8, 40, 16, Rule(soft_cap=1.5)),
    (2, 1, 512, 512, 16, Rule()),
    (4, 2, 16, 16, 16, Rule(chunk=80)),
    (4, 2, 16, 24, 48, Rule(chunk=7, sinks_H=SINKS, soft_cap=2.0)),
    (4, 1, 16, 16, 16, Rule(chunk=64, window=40)),
]
LATENT_CASES = [
    (4, 1, 40, 32, 16, Rule()),
    (17, 1, 72, 64, 48, Rule(window=70)),
    (5, 1, 576, 512, 16, Rule()),
]
LATENT_CASES += [(32, 1, 24, 16, 16, Rule())]


TYPES = [  # of caches and of queries
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.int8, torch.float32),
    (torch.int8, torch.float16),
    (torch.int8, torch.bfloat16),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("h", "g", "d", "v", "size", "rule"), CASES + LATENT_CASES)
def test_bits_are_the_references_in_any_company(
    h: int, g: int, d: int, v: int, size: int, rule: Rule, isa: str
) -> None:
    """Queries and caches of both types; whole contexts, then parts in random company with 1 to 3
    threads.
    """
    MODULE.use_isa(isa)
    lengths = [200, 1, 63, 64, 65, 131]
    rng = np.random.default_rng(4)
    latent = (h, g, d, v, size, rule) in LATENT_CASES
    for dtype, q_dtype in TYPES[:3] if latent else TYPES:
        cache = make_cache(lengths, g, d, size, dtype, v_dim=v, latent=latent)
        q = make_queries(lengths, h, d, q_dtype)
        whole = run(cache, [(c, 0, n) for c, n in enumerate(lengths)], q, rule)
        for context, length in enumerate(lengths):
            for position in {0, length // 2, length - 1}:
                expected = reference(cache, (context, position, 1), q, rule).to(q_dtype)
                assert torch.equal(whole[context][position], expected), (context, position)
        for turn in range(12):
            MODULE.set_threads([-1] * (turn % 3 + 1))
            order = rng.permutation(len(lengths))[: rng.integers(1, 6)].tolist()
            rows = [
                (
                    c,
                    *cut(
                        lengths[c],
                        int(rng.integers(0, lengths[c])),
                        int(rng.choice([1, 1, 3, 9, 70])),
                    ),
                )
                for c in order
            ]
            for (c, s, n), found in zip(rows, run(cache, rows, q, rule), strict=True):
                assert torch.equal(found, whole[c][s : s + n]), (c, s, n)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("length", "window"), [(1023, None), (1024, None), (1025, 100), (4097, None), (40_000, None)]
)
@pytest.mark.parametrize(
    ("dtype", "q_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.int8, torch.bfloat16),
    ],
)
def test_long_contexts_have_the_bits_of_the_reference(
    length: int, window: int | None, isa: str, dtype: torch.dtype, q_dtype: torch.dtype
) -> None:
    """Alone, with threads sharing the chunks; beside others; and as the end of a prompt."""
    MODULE.use_isa(isa)
    lengths = [length, 40]
    cache = make_cache(lengths, 2, 16, 16, dtype)
    q = make_queries(lengths, 4, 16, q_dtype)
    rule = Rule(window=window)
    expected = reference(cache, (0, length - 1, 1), q, rule).to(q_dtype)
    pieces = []
    for threads in (1, 2, 3):
        MODULE.set_threads([-1] * threads)
        alone = run(cache, [(0, length - 1, 1)], q, rule)[0][0]
        beside = run(cache, [(1, 39, 1), (0, length - 1, 1)], q, rule)[1][0]
        end = run(cache, [(0, length - 70, 70), (1, 0, 40)], q, rule)[0]
        assert torch.equal(alone, expected)
        assert torch.equal(beside, expected)
        assert torch.equal(end[-1], expected)
        one_by_one = [
            run(cache, [(0, p, 1)], q, rule)[0][0] for p in range(length - 70, length - 64)
        ]
        assert torch.equal(torch.stack(one_by_one), end[:6])
        _, args = step(cache, [(0, length - 1, 1)], q, rule)
        pieces.append(native_layer.plan_attention(*args).pieces.num_pieces)
    assert pieces[0] == 1
    if length > 2000:
        assert pieces[1] == -(-length // 1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [None, 100])
def test_one_by_one_in_chunks_and_at_once(window: int | None, dtype: torch.dtype) -> None:
    cache = make_cache([1100], 2, 64, 16, dtype)
    q = make_queries([1100], 4, 64, torch.bfloat16)
    rule = Rule(window=window)
    whole = run(cache, [(0, 0, 1100)], q, rule)[0]
    chunks = [run(cache, [(0, s, min(300, 1100 - s))], q, rule)[0] for s in range(0, 1100, 300)]
    assert torch.equal(torch.cat(chunks), whole)
    single = [run(cache, [(0, p, 1)], q, rule)[0] for p in range(1100)]
    assert torch.equal(torch.cat(single), whole)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2), (torch.int8, 1e-5)],
)
@pytest.mark.parametrize(
    ("rule", "g", "d", "v"),
    [
        (Rule(), 2, 64, 64),
        (Rule(window=70), 2, 64, 64),
        (Rule(chunk=96, sinks_H=SINKS), 2, 64, 32),
        (Rule(soft_cap=2.0, sinks_H=SINKS), 2, 64, 64),
        (Rule(), 1, 576, 512),
    ],
)
def test_agrees_with_torch(
    rule: Rule, g: int, d: int, v: int, dtype: torch.dtype, tolerance: float
) -> None:
    lengths = [1, 64, 700, 1500]
    rows = [(0, 0, 1), (1, 63, 1), (2, 400, 300), (3, 1499, 1)]
    cache = make_cache(lengths, g, d, 16, dtype, v_dim=v, latent=g == 1 and dtype != torch.int8)
    q = make_queries(lengths, 4, d, query_type(dtype))
    queries, args = step(cache, rows, q, rule)
    extra: dict[str, Any] = {"sinks_H": rule.sinks_H, "soft_cap": rule.soft_cap}
    expected = torch_attention.attention(
        queries, cache.k, cache.v, torch_attention.plan_attention(*args), **extra
    )
    found = native_layer.attention(
        queries, cache.k, cache.v, native_layer.plan_attention(*args), **extra
    )
    assert found.dtype == query_type(dtype)
    assert (found.float() - expected.float()).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("isa", ISAS)
def test_soft_cap_and_sinks(isa: str, dtype: torch.dtype) -> None:
    MODULE.use_isa(isa)
    MODULE.set_threads([-1, -1])
    lengths = [1300, 90]
    cache = make_cache(lengths, 2, 40, 16, dtype)
    q = [8 * x for x in make_queries(lengths, 4, 40, torch.float32)]
    rule = Rule(soft_cap=5.0, sinks_H=SINKS)
    decoded = run(cache, [(0, 1299, 1)], q, rule)[0][0]
    prefilled = run(cache, [(1, 0, 90), (0, 1200, 100)], q, rule)
    assert torch.equal(prefilled[1][-1], decoded)
    assert torch.equal(decoded, reference(cache, (0, 1299, 1), q, rule))
    for context, found in ((0, decoded), (1, prefilled[0][-1])):
        scores = torch.einsum("ghd,tgd->ght", q[context][-1].view(2, 2, 40), cache.keys[context])
        scores = torch.cat((5.0 * torch.tanh(scores / 5.0), SINKS.view(2, 2, 1)), -1)
        expected = torch.einsum(
            "ght,tgd->ghd", scores.softmax(-1)[..., :-1], cache.values[context]
        ).flatten()
        assert (found - expected).abs().max() < 5e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_addresses_need_no_alignment(dtype: torch.dtype) -> None:
    cache = make_cache([130], 2, 24, 16, dtype)
    q = make_queries([130], 4, 24, torch.bfloat16)
    expected = run(cache, [(0, 0, 130)], q, Rule())[0]
    shifted = [
        torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
        for x in (cache.k, cache.v)
    ]
    cache.k, cache.v = shifted
    assert torch.equal(run(cache, [(0, 0, 130)], q, Rule())[0], expected)
    assert torch.equal(run(cache, [(0, 129, 1)], q, Rule())[0][0], expected[-1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
def test_scales_of_any_size(isa: str, q_dtype: torch.dtype) -> None:
    """Zero, tiny and huge keys and values, and one that is not a number."""
    MODULE.use_isa(isa)
    cache = make_cache([200], 2, 24, 16, torch.float32)
    sizes = torch.tensor([0.0, 1e-45, 1e-38, 1e-20, 1.0, 1e20, 1e37])[torch.arange(200) % 7].view(
        200, 1, 1
    )
    slots = torch.tensor([cache.tables[0][p // 16] * 16 + p % 16 for p in range(200)])
    cache.k, cache.v = (to_entries(x, torch.int8) for x in (cache.k, cache.v))
    write_kv(cache.keys[0] * sizes, cache.values[0] * sizes.flip(0), cache.k, cache.v, slots)
    q = [x * 1e-3 for x in make_queries([200], 4, 24, q_dtype)]
    found = run(cache, [(0, 0, 200)], q, Rule())[0]
    for position in (0, 5, 150, 199):
        assert torch.equal(
            found[position], reference(cache, (0, position, 1), q, Rule()).to(q_dtype)
        ), position
    assert found.isfinite().all()
    cache.keys[0][100, 1, 3] = torch.inf
    write_kv(cache.keys[0][100:101], cache.values[0][100:101], cache.k, cache.v, slots[100:101])
    broken = run(cache, [(0, 0, 200)], q, Rule())[0]
    assert torch.equal(broken[:100], found[:100])
    assert broken[100:, 48:].isnan().all()
    assert broken[100:, :48].isfinite().all()


def test_later_values_do_not_reach_earlier_queries() -> None:
    """Infinite values of a position that a query does not see, in the same tile."""
    cache = make_cache([60], 1, 16, 16, torch.float32)
    q = make_queries([60], 4, 16, torch.float32)
    rule = Rule(window=20)
    expected = run(cache, [(0, 0, 60)], q, rule)[0]
    slot = cache.tables[0][1] * 16 + 4  # position 20
    cache.v.view(-1, 16)[slot] = torch.inf
    cache.k.view(-1, 16)[slot] = torch.nan
    found = run(cache, [(0, 0, 60)], q, rule)[0]
    assert torch.equal(found[:20], expected[:20])
    assert torch.equal(found[40:], expected[40:])
    assert found[20:40].isnan().all()


def test_scores_of_minus_infinity_weigh_nothing() -> None:
    """A key that overflowed, alone in its tile or chunk as far as the window goes, or the only one
    there is.
    """
    cache = make_cache([1100], 1, 16, 16, torch.float32)
    q = [x.abs() + 0.1 for x in make_queries([1100], 2, 16, torch.float32)]
    slots = [cache.tables[0][position // 16] * 16 + position % 16 for position in (0, 63, 1023)]
    cache.k.view(-1, 16)[slots] = -torch.inf
    cache.v.view(-1, 16)[slots] = 1e9
    rule = Rule(window=8)
    found = run(cache, [(0, 0, 1100)], q, rule)[0]
    assert found[0].isnan().all()
    assert found[1:].abs().max() < 10
    for position in (1, 65, 70, 1023, 1030):
        assert torch.equal(found[position], reference(cache, (0, position, 1), q, rule)), position
    sinks = Rule(window=8, sinks_H=SINKS[:2])
    assert not run(cache, [(0, 0, 1)], q, sinks)[0].any()
    assert not reference(cache, (0, 0, 1), q, sinks).any()


def test_no_negative_zeros() -> None:
    cache = make_cache([3], 1, 8, 16, torch.float32)
    cache.v.fill_(-0.0)
    found = run(cache, [(0, 0, 3)], make_queries([3], 2, 8, torch.float32), Rule())[0]
    assert not found.any()
    assert not found.signbit().any()


def test_a_step_without_tokens() -> None:
    plan = native_layer.plan_attention(
        *host_step(torch.zeros((0, 1), dtype=torch.int64), 16, [], [0]), HeadShape(4, 2, 16, 16)
    )
    cache = torch.zeros(2, 16, 2, 16)
    assert not native_layer.attention(torch.ones(1, 4, 16), cache, cache.clone(), plan).any()


@pytest.mark.parametrize(
    ("h", "threads", "pieces"), [(32, 1, 1), (32, 2, 4), (32, 16, 4), (24, 2, 2), (17, 3, 1)]
)
def test_threads_share_the_heads_of_one_latent(h: int, threads: int, pieces: int) -> None:
    MODULE.set_threads([-1] * threads)
    cache = make_cache([100], 1, 24, 16, torch.float32, v_dim=16, latent=True)
    q = make_queries([100], h, 24, torch.float32)
    _, args = step(cache, [(0, 99, 1)], q, Rule())
    assert native_layer.plan_attention(*args).pieces.num_pieces == pieces
    assert torch.equal(
        run(cache, [(0, 99, 1)], q, Rule())[0][0], reference(cache, (0, 99, 1), q, Rule())
    )


def test_head_widths() -> None:
    assert [width for width in (0, 4, 8, 12, 64, 576, 584) if width in native_layer.HEAD_DIMS] == [
        8,
        64,
        576,
    ]
