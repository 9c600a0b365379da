"""Misuses that the fake package detects but no adapter commits, and checks of its own results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from moeserve.moe.all2all.deepep.base import BufferMesh
from tests.comm.ranks import members_of, together
from tests.moe.deepep import fake
from tests.moe.deepep.fake.tensors import POISON_INT

T = TypeVar("T")
EXPERTS = 6
TOP_K = 2
HIDDEN = 2048
LIMIT = 8


def on_two(work: Callable[[int, Any], T]) -> list[T]:
    """`work` with a process group each."""
    groups = [BufferMesh(members, 1, "fake") for members in members_of(2)]
    ready = together([lambda g=g: g.process_group(False) for g in groups])  # type: ignore[misc]
    try:
        return together([lambda r=r: work(r, ready[r]) for r in range(2)])  # type: ignore[misc]
    finally:
        for group in groups:
            group.close()


def low_latency(group: Any) -> Any:
    size = fake.Buffer.get_low_latency_rdma_size_hint(LIMIT, HIDDEN, 2, EXPERTS)
    return fake.Buffer(group, num_rdma_bytes=size, low_latency_mode=True, explicitly_destroy=True)


def elastic(group: Any, deterministic: bool = True) -> Any:
    return fake.ElasticBuffer(
        group,
        num_max_tokens_per_rank=LIMIT,
        hidden=HIDDEN,
        num_topk=TOP_K,
        deterministic=deterministic,
        explicitly_destroy=True,
    )


def tokens(rank: int, count: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows that encode their origin, ids and weights.

    Token t goes to experts t and t + 3, modulo 6.
    """
    x = (torch.arange(count) + 10 * rank)[:, None].expand(-1, HIDDEN).bfloat16().contiguous()
    ids = (torch.arange(count)[:, None] + torch.tensor([0, 3])) % EXPERTS
    return x, ids, torch.full((count, TOP_K), 0.5)


def test_a_destroyed_buffer_is_gone() -> None:
    def work(rank: int, group: Any) -> None:
        old = low_latency(group)
        new = elastic(group)
        old.destroy()
        new.destroy()
        x, ids, _ = tokens(rank)
        for call in (
            lambda: old.low_latency_dispatch(x, ids, LIMIT, EXPERTS),
            lambda: new.dispatch(x, ids, num_experts=EXPERTS),
            old.destroy,
        ):
            with pytest.raises(AssertionError, match="was destroyed"):
                call()
        with pytest.raises(AssertionError, match="explicitly_destroy"):
            fake.Buffer(group).destroy()

    on_two(work)


def low_latency_send(buffer: Any, rank: int, **changes: Any) -> Any:
    x, ids, _ = tokens(rank)
    return buffer.low_latency_dispatch(
        x, ids, LIMIT, EXPERTS, **{"use_fp8": False, "return_recv_hook": True, **changes}
    )


def test_low_latency_is_poison_until_the_hook_and_behind_the_rows() -> None:
    def work(rank: int, group: Any) -> None:
        x, count, handle, event, hook = low_latency_send(low_latency(group), rank)
        assert x.isnan().all()
        assert (count == POISON_INT).all()
        assert event.event is None
        hook()
        assert count.dtype == torch.int32
        for slot, rows in enumerate(count.tolist()):
            assert x[slot, :rows].isfinite().all()
            assert x[slot, rows:].isnan().all()
        assert handle[2:] == (LIMIT, HIDDEN, EXPERTS)

    on_two(work)


def test_low_latency_has_two_buffers() -> None:
    def work(rank: int, group: Any) -> None:
        buffer, (_, ids, weights) = low_latency(group), tokens(rank)
        first = low_latency_send(buffer, rank)
        with pytest.raises(AssertionError, match="wipes the counters"):
            low_latency_send(buffer, rank)
        first[-1]()
        low_latency_send(buffer, rank)[-1]()
        with pytest.raises(AssertionError, match="three low-latency results"):
            low_latency_send(buffer, rank)
        out, _, hook = buffer.low_latency_combine(
            first[0], ids, weights, first[2], return_recv_hook=True
        )
        assert out.isnan().all()
        hook()
        assert torch.equal(out, tokens(rank)[0])  # weighted: half of it twice
        with pytest.raises(AssertionError, match="called once"):
            hook()
        with pytest.raises(AssertionError, match="serves once"):
            buffer.low_latency_combine(first[0], ids, weights, first[2])

    on_two(work)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"async_finish": True}, "excludes return_recv_hook"),
        ({"num_max_dispatch_tokens_per_rank": 4}, "5 tokens of at most 4"),
        ({"num_max_dispatch_tokens_per_rank": 512}, "queue pairs are too short"),
        ({"num_max_dispatch_tokens_per_rank": 16}, "RDMA bytes, .* are needed"),
        ({"use_ue8m0": True}, "needs round_scale"),
        ({"topk_idx": torch.full((5, 2), EXPERTS)}, "not among the 6 experts"),
        ({"topk_idx": torch.zeros(5, 12, dtype=torch.int64)}, "more than 11 experts"),
        ({"x": torch.zeros(5, 2304, dtype=torch.bfloat16)}, "no kernels for rows of 2304"),
        ({"x": torch.zeros(5, HIDDEN)}, "must be bfloat16"),
    ],
)
def test_low_latency_dispatch_refuses(changes: dict[str, Any], why: str) -> None:
    def work(rank: int, group: Any) -> None:
        x, ids, _ = tokens(rank)
        arguments = {
            "num_max_dispatch_tokens_per_rank": LIMIT,
            "num_experts": EXPERTS,
            "x": x,
            "topk_idx": ids,
        }
        with pytest.raises(AssertionError, match=why):
            low_latency(group).low_latency_dispatch(
                **{**arguments, "return_recv_hook": True, **changes}
            )

    on_two(work)


def test_low_latency_combine_refuses() -> None:
    def work(rank: int, group: Any) -> None:
        _, ids, weights = tokens(rank)
        for changes, why in (
            ({"use_logfmt": True, "zero_copy": True}, "exclude each other"),
            ({"async_finish": True, "return_recv_hook": True}, "excludes return_recv_hook"),
            ({"topk_weights": weights.double()}, "must be float32"),
            ({"x": torch.zeros(3, 8, HIDDEN, dtype=torch.bfloat16)}, r"x must be \(3, 16, 2048\)"),
            ({"out": torch.zeros(5, HIDDEN)}, "out must be bfloat16"),
        ):
            buffer = low_latency(group)
            x, _, handle, _, hook = low_latency_send(buffer, rank)
            hook()
            arguments = {
                "x": x,
                "topk_idx": ids,
                "topk_weights": weights,
                "handle": handle,
                **changes,
            }
            with pytest.raises(AssertionError, match=why):
                buffer.low_latency_combine(**arguments)

    on_two(work)


def test_ranks_must_agree() -> None:
    def work(rank: int, group: Any) -> None:
        buffer, (x, ids, _) = low_latency(group), tokens(rank, 4)
        hook = buffer.low_latency_dispatch(
            x, ids, (8, 4)[rank], EXPERTS, use_fp8=False, return_recv_hook=True
        )[-1]
        with pytest.raises(AssertionError, match="differ in the most tokens"):
            hook()
        other = elastic(group)
        with pytest.raises(AssertionError, match="different things at the same time"):
            other.destroy() if rank else other.dispatch(x, ids, num_experts=EXPERTS)

    on_two(work)


@pytest.mark.parametrize("deterministic", [True, False])
def test_elastic_rows_by_expert(deterministic: bool) -> None:
    def work(rank: int, group: Any) -> Any:
        buffer, (x, ids, weights) = elastic(group, deterministic), tokens(rank)
        rows, none, row_weights, handle, _ = buffer.dispatch(
            x, ids, weights, num_experts=EXPERTS, expert_alignment=4, do_expand=True
        )
        assert none is None
        assert rows.shape[0] == row_weights.shape[0] == 12
        home, _, _ = buffer.combine(rows, handle)
        assert torch.equal(home, x * 2)
        return rows[:, 0].tolist(), handle

    rows, handle = on_two(work)[1]
    assert handle.num_recv_tokens_per_expert_list == [4, 4, 4]
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == [4, 4, 2]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == [4, 8, 10]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == [5, 10]
    assert rows[:4] == ([0, 3, 10, 13] if deterministic else [3, 0, 13, 10])
    assert torch.tensor(rows[10:]).isnan().all()


def test_elastic_without_counts_has_room_for_the_worst() -> None:
    def work(rank: int, group: Any) -> None:
        buffer, (x, ids, weights) = elastic(group), tokens(rank)
        rows, local, _, handle, _ = buffer.dispatch(
            x, ids, weights, num_experts=EXPERTS, do_cpu_sync=False
        )
        assert rows.shape[0] == local.shape[0] == 2 * LIMIT
        assert rows[10:].isnan().all()
        assert handle.num_recv_tokens_per_expert_list == []
        wide = buffer.dispatch(
            x, ids, weights, num_experts=EXPERTS, do_cpu_sync=False, do_expand=True
        )[0]
        assert wide.shape[0] == 2 * LIMIT * TOP_K
        again, _, _, same, _ = buffer.dispatch(x, handle=handle)
        assert same is handle
        assert torch.equal(again[:10], rows[:10])

    on_two(work)


def test_elastic_dispatch_refuses() -> None:
    def work(rank: int, group: Any) -> None:
        buffer, (x, ids, weights) = elastic(group), tokens(rank)
        handle = buffer.dispatch(x, ids, weights, num_experts=EXPERTS)[3]
        event = buffer.capture()
        for arguments, why in (
            ({"handle": handle, "topk_idx": ids}, "excludes topk_idx"),
            ({"handle": handle, "do_cpu_sync": True}, "excludes do_cpu_sync"),
            ({"handle": handle, "expert_alignment": 8}, "are not the handle's"),
            ({"handle": handle, "num_max_tokens_per_rank": 4}, "are not the handle's"),
            ({"topk_idx": ids.int()}, "must be int64"),
            ({"topk_idx": ids, "do_zero_padding": True}, "needs do_expand"),
            ({"topk_idx": ids, "previous_event": event}, "needs allocate_on_comm_stream"),
            ({"topk_idx": ids, "num_max_tokens_per_rank": 4}, "5 tokens of at most 4"),
            ({"topk_idx": ids[:0], "x": x[:0]}, "sends a dummy"),
            ({"topk_idx": ids, "num_max_tokens_per_rank": 1 << 20}, "the buffer is too small"),
        ):
            given = {
                "x": x,
                **({} if "handle" in arguments else {"num_experts": EXPERTS}),
                **arguments,
            }
            with pytest.raises(AssertionError, match=why):
                buffer.dispatch(**given)

    on_two(work)
