"""Index selectors: the choice against a plain sort, hostile scores, and bits that belong to the
query; native ones are those of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.ops.inputs import GroupInputs, HeadShape, StepInputs
from moeserve.ops.native_latent import index_select as native_index_select
from moeserve.ops.native_layer import NativeHeads
from moeserve.ops.pick import pick_ops
from moeserve.ops.probe import host_step
from moeserve.ops.selected import Selection, chosen_as_requests, index_select, plan_selection
from moeserve.ops.table import Choice, Ops

from .isas import ISAS, MODULE, needs_native

SIZE = 16
BLOCKS = 200
pytestmark = pytest.mark.usefixtures("usual_native")


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there the kernels are not interpreted"
)


@pytest.fixture(params=["torch", "auto", pytest.param("triton", marks=INTERPRETED)])
def ops(request: pytest.FixtureRequest) -> Ops:
    return pick_ops("cpu", torch.float32, request.param)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(*rows: tuple[int, int], seed: int = 0) -> tuple[GroupInputs, StepInputs]:
    """A step of (start, tokens), each request in scattered blocks; that of row i is the same in
    every step.
    """
    counts = [count for _, count in rows]
    order = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS)).reshape(-1)
    width = BLOCKS // len(rows) - 1
    blocks = torch.from_numpy(order[: width * len(rows)].reshape(len(rows), width))
    return host_step(blocks, SIZE, [start for start, _ in rows], [0, *np.cumsum(counts)])


def planned(group: GroupInputs, step: StepInputs, top_k: int) -> Selection:
    selection = plan_selection(group, step, top_k)
    assert selection is not None
    return selection


def positions_of(slots: Tensor, blocks: Tensor) -> list[int]:
    """The positions of a request that cache rows hold."""
    where = {int(block): i for i, block in enumerate(blocks)}
    return [where[slot // SIZE] * SIZE + slot % SIZE for slot in slots.tolist()]


@pytest.mark.parametrize(
    ("heads", "dim", "top_k"), [(1, 8, 1), (3, 24, 7), (5, 136, 40), (64, 16, 100)]
)
def test_choice_is_that_of_a_plain_sort(heads: int, dim: int, top_k: int, ops: Ops) -> None:
    """Small whole numbers: scores are exact, and many are equal."""
    rows = [(0, 60), (130, 1), (90, 33), (5, 3)]
    group, step = rows_of(*rows)
    selection = planned(group, step, top_k)
    q = random(130, heads, dim).round()
    weights = random(130, heads, seed=1).round()
    cache = random(BLOCKS, SIZE, 1, dim, seed=2).round()
    tokens = selection.tokens_S.tolist()
    slots = ops.index_select(q[tokens], weights[tokens], cache, selection, ops.pack_heads)
    owners = [(row, start + i) for row, (start, count) in enumerate(rows) for i in range(count)]
    assert tokens == [token for token, (_, position) in enumerate(owners) if position >= top_k]
    assert sorted([*tokens, *selection.other_tokens.tolist()]) == list(range(len(owners)))
    for token, chosen in zip(tokens, slots, strict=True):
        row, position = owners[token]
        keys = cache.view(-1, dim)[
            torch.arange(position + 1) % SIZE
            + group.blocks_RN[row].repeat_interleave(SIZE)[: position + 1] * SIZE
        ]
        scores = (weights[token] * (keys @ q[token].T).relu()).sum(1).tolist()
        best = sorted(range(position + 1), key=lambda i, scores=scores: (-scores[i], i))[:top_k]
        assert positions_of(chosen, group.blocks_RN[row]) == sorted(best)


@pytest.mark.filterwarnings("ignore:invalid")  # by the interpreter
def test_hostile_scores(ops: Ops) -> None:
    """NaN and infinity are chosen first and minus infinity last; zeros of both signs are equal;
    later tokens and the null block do not matter."""
    group, step = rows_of((70, 1))
    cache = torch.full((BLOCKS, SIZE, 1, 8), torch.nan)
    keys = torch.zeros(71, 8)
    for position, value in {3: torch.nan, 9: torch.inf, 20: 2.0, 30: 1.0, 40: -torch.inf}.items():
        keys[position, 0] = value
    table = group.blocks_RN[0]
    for position, key in enumerate(keys):
        cache[table[position // SIZE], position % SIZE, 0] = key
    q = torch.zeros(1, 2, 8)
    q[0, :, 0] = torch.tensor([1.0, -1.0])

    def choose(top_k: int, weights: list[float]) -> list[int]:
        selection = planned(group, step, top_k)
        return positions_of(
            ops.index_select(q, torch.tensor([weights]), cache, selection, ops.pack_heads)[0], table
        )

    assert choose(3, [1.0, 0.0]) == [3, 9, 40]  # 0 * infinity is NaN
    assert choose(5, [1.0, -1.0]) == [0, 3, 9, 20, 30]
    assert choose(69, [1.0, -1.0]) == [i for i in range(71) if i not in (40, 70)]
    assert choose(7, [-0.0, -0.0]) == [0, 1, 2, 3, 4, 9, 40]


@needs_native
def test_native_choice_among_any_scores() -> None:
    """Two heads of one element make a key its own score."""
    q = torch.tensor([[[1.0], [-1.0]]])
    weights = torch.tensor([[1.0, -1.0]])
    hostile = torch.tensor(
        [torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 1e38, -1e38, 3.0]
    )
    for seed, length in enumerate((2, 17, 100, 1000, 3100)):
        group, step = rows_of((length - 1, 1))
        choices = {
            "hostile": hostile[
                torch.randint(
                    len(hostile), (BLOCKS, SIZE), generator=torch.Generator().manual_seed(seed)
                )
            ],
            "equal": torch.full((BLOCKS, SIZE), -2.5),
            "near": 1 + random(BLOCKS, SIZE, seed=seed).round() * 2**-23,
            "any": random(BLOCKS, SIZE, seed=seed).exp()
            * random(BLOCKS, SIZE, seed=seed + 1).sign(),
        }
        for name, keys in choices.items():
            for top_k in {1, length // 2, length - 1}:
                args = (
                    q,
                    weights,
                    keys[:, :, None, None].contiguous(),
                    planned(group, step, top_k),
                    NativeHeads,
                )
                assert torch.equal(native_index_select(*args), index_select(*args)), (
                    name,
                    length,
                    top_k,
                )


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 24), (16, 128), (9, 5)])
def test_native_scores_have_the_bits_of_the_products(
    heads: int, dim: int, dtype: torch.dtype
) -> None:
    """This holds on any instruction set and with any number of threads.

    Only rounding makes scores differ, as below.
    """
    group, step = rows_of((0, 20), (1000, 40), (320, 1))
    cache = (
        random(dim, seed=4)[random(BLOCKS * SIZE, dim, seed=2).argsort(-1)]
        .view(BLOCKS, SIZE, 1, dim)
        .to(dtype)
    )
    selection = planned(group, step, 19)
    count = len(selection.tokens_S)
    q = random(count, heads, 1).expand(-1, -1, dim).to(dtype)
    weights = random(count, heads, seed=1)
    expected = index_select(q, weights, cache, selection, NativeHeads)
    for isa in ISAS:
        MODULE.use_isa(isa)
        for threads in (1, 2, 3):
            MODULE.set_threads([-1] * threads)
            found = native_index_select(q, weights, cache, selection, NativeHeads)
            assert torch.equal(found, expected), (isa, threads)


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 24), (64, 128)])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_choice_depends_on_query_and_context_alone(
    heads: int, dim: int, dtype: torch.dtype, kernels: Choice
) -> None:
    """The same queries at once, in chunks and in company, with one thread and with two. Keys differ
    in the order of their elements and queries have equal ones, so that only roundings make scores
    differ: another order of a sum would choose others."""
    length = 1150
    top_k = 30
    orders = random(BLOCKS * SIZE, dim, seed=2).argsort(-1)
    cache = random(dim, seed=4)[orders].view(BLOCKS, SIZE, 1, dim).to(dtype)
    q = random(length, heads, 1).expand(-1, -1, dim).to(dtype)
    weights = random(length, heads, seed=1)
    group, _ = rows_of((0, length))
    first = 1100
    others = random(9, heads, dim, seed=3).to(dtype)

    def choose(rows: list[tuple[int, int]], threads: int) -> Tensor:
        torch.set_num_threads(threads)
        ops = pick_ops("cpu", dtype, kernels)
        found = []
        for start, count in rows:
            other = [(40, 4), (start, count), (300, 5)] if count < 20 else [(start, count)]
            _, step = rows_of(*other)
            blocks = group.blocks_RN.expand(len(other), -1).contiguous()
            here = GroupInputs(group.slot_mapping_T, blocks, SIZE, None)
            mine = slice(start, start + count)
            parts = [others[:4], q[mine], others[4:]] if len(other) > 1 else [q[mine]]
            gates = [weights[:4], weights[mine], weights[:5]] if len(other) > 1 else [weights[mine]]
            selection = planned(here, step, top_k)
            slots = ops.index_select(
                torch.cat(parts), torch.cat(gates), cache, selection, ops.pack_heads
            )
            found.append(slots[4:-5] if len(other) > 1 else slots)
        return torch.cat(found)

    expected = choose([(first, length - first)], 1)
    assert torch.equal(
        choose([(first, 7), (first + 7, 1), (first + 8, 2), (first + 10, 40)], 2), expected
    )
    assert torch.equal(choose([(p, 1) for p in range(first, first + 12)], 1), expected[:12])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_all_tokens_chosen_have_the_bits_of_plain_attention(
    kernels: Choice, dtype: torch.dtype
) -> None:
    ops = pick_ops("cpu", dtype, kernels)
    shape = HeadShape(4, 1, 40, 32)
    group, step = rows_of((0, 100))
    q = random(100, 4, 40).to(dtype)
    cache = random(BLOCKS, SIZE, 1, 40, seed=1).to(dtype)
    plain = ops.attention(q, cache, cache[..., :32], ops.plan_attention(group, step, shape))
    for count in (1, 64, 65, 100):
        positions = torch.arange(count)
        slots = (group.blocks_RN[0][positions // SIZE] * SIZE + positions % SIZE)[None]
        plan = ops.plan_attention(*chosen_as_requests(slots, group, step), shape)
        entries = cache.view(-1, 1, 1, 40)
        found = ops.attention(q[count - 1 : count].contiguous(), entries, entries[..., :32], plan)
        assert torch.equal(found[0], plain[count - 1])


def test_nothing_selects_where_few_tokens_are_seen() -> None:
    assert plan_selection(*rows_of((0, 20), (19, 1)), 20) is None
    selection = planned(*rows_of((0, 20), (20, 1)), 20)
    assert selection.tokens_S.tolist() == [20]
    assert selection.others is not None
    assert selection.others[1].offsets_R1.tolist() == [0, 20]
    assert planned(*rows_of((20, 1)), 20).others is None
