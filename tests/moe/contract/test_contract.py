"""The contract of every all2all backend: with any number of ranks the bits are those of one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.errors import PeerLost
from moeserve.moe.all2all.base import All2All, Inbound, Layout
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.all2all.wire_format import wire_of
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from tests.moe.contract.backends import (
    INTERPRETED,
    LOCAL,
    MAX_TOKENS,
    NAMES,
    SMALL_STEPS,
    TOP_K,
    WIDTH,
    group,
)

Batch = tuple[Tensor, Routing]
EVERY_BACKEND = pytest.mark.parametrize("name", NAMES)


def batch(ids_TK: np.ndarray, dtype: torch.dtype, seed: int) -> Batch:
    """Rows and weights for these ids; NaN, infinities and signed zeros are among the rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = len(ids_TK)
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype)
    if tokens > 3:
        x[0, ::2] = -0.0
        x[1, 3] = torch.inf
        x[2, 4] = torch.nan
    return x, Routing(
        torch.from_numpy(ids_TK.astype(np.int32)), torch.rand(ids_TK.shape, generator=generator)
    )


def cases(ranks: int) -> dict[str, list[np.ndarray]]:
    """Ids of every rank's tokens."""
    rng = np.random.default_rng(ranks)
    num_physical = ranks * LOCAL
    k = min(TOP_K, num_physical)

    def distinct(tokens: int) -> np.ndarray:
        return np.array([rng.permutation(num_physical)[:k] for _ in range(tokens)], int).reshape(
            tokens, k
        )

    uneven = [distinct(n) for n in (5, 17, 1, 9)[:ranks]]
    holes = [np.where(rng.random(ids.shape) < 0.4, -1, ids) for ids in uneven]
    return {
        "uneven": uneven,
        "none on some": [distinct(7 if rank == ranks - 1 else 0) for rank in range(ranks)],
        "none on all": [distinct(0) for _ in range(ranks)],
        "all to one expert": [np.full((6 + rank, 1), num_physical - 1) for rank in range(ranks)],
        "all padding": [np.full((4, k), -1) for _ in range(ranks)],
        "holes": holes,
        "duplicate ids": [rng.integers(0, num_physical, (8, k)) for _ in range(ranks)],
        "one expert per token": [rng.integers(0, num_physical, (12, 1)) for _ in range(ranks)],
        "capacity full": [distinct(MAX_TOKENS) for _ in range(ranks)],
    }


def experts(inbound: Inbound, first: int) -> Tensor:
    """Stands in for experts: expert s multiplies by s + 1/2. Results of rows beyond the last are
    NaN.
    """
    counts = inbound.host_counts_e
    slotted = inbound.layout is Layout.SLOTTED
    assert inbound.ends_e.tolist() == (counts if slotted else np.cumsum(counts)).tolist()
    y = torch.full_like(inbound.x, torch.nan)
    starts = [0] * len(counts) if slotted else (np.cumsum(counts) - counts).tolist()
    for expert, (start, end) in enumerate(zip(starts, inbound.ends_e.tolist(), strict=True)):
        x, to = (part[expert] if slotted else part for part in (inbound.x, y))
        to[start:end] = x[start:end] * (first + expert + 0.5)
    return y


def there_and_back(backend: All2All, ubatch: UBatch, part: Batch, first: int) -> Tensor:
    x, routing = part
    ticket = backend.dispatch(x, routing, ubatch).wait()
    out = torch.full_like(x, torch.nan)
    y = experts(ticket.inbound, first)
    if ticket.y is not None:
        ticket.y.copy_(y)
        y = ticket.y
    assert backend.combine(ticket, y, out, ubatch).wait() is out
    return out


def alone(ranks: int, part: Batch, wire: str = "auto") -> Tensor:
    """The specification."""
    return there_and_back(
        LocalAll2All(ranks * LOCAL, wire_of(wire, part[0].dtype)), UBatch(), part, 0
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.nan_to_num().view(whole), b.nan_to_num().view(whole)) and torch.equal(
        a.isnan(), b.isnan()
    )


BITS = [
    (name, dtype, ranks)
    for name in NAMES
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for ranks in (1, 2, 3, 4)
    if name not in INTERPRETED or (dtype, ranks) in ((torch.float32, 3), (torch.bfloat16, 2))
]


@pytest.mark.full("ranks", keep="pairs")
@pytest.mark.parametrize(("name", "dtype", "ranks"), BITS)
def test_bits_are_those_of_one_rank(
    name: str, dtype: torch.dtype, ranks: int, tmp_path: Path
) -> None:
    parts = [
        [batch(ids, dtype, 7 * r) for r, ids in enumerate(by_rank)]
        for by_rank in cases(ranks).values()
    ]
    expected = [[alone(ranks, part) for part in by_rank] for by_rank in parts]

    def work(rank: int, backend: All2All) -> list[Tensor]:
        ubatch = UBatch()
        return [there_and_back(backend, ubatch, by_rank[rank], rank * LOCAL) for by_rank in parts]

    with group(name, dtype, ranks, str(tmp_path)) as ranks_of:
        for rank, outs in enumerate(ranks_of.run(work)):
            for case, out, by_rank in zip(cases(ranks), outs, expected, strict=True):
                assert same_bits(out, by_rank[rank]), (case, rank)


@EVERY_BACKEND
def test_a_wire_that_rounds_rounds_every_row(name: str, tmp_path: Path) -> None:
    """Rows that stay on their rank are rounded too, so bits do not depend on where an expert is."""
    parts = [batch(ids, torch.bfloat16, r) for r, ids in enumerate(cases(2)["uneven"])]
    with group(name, torch.bfloat16, 2, str(tmp_path), wire="fp8_b128") as ranks_of:
        outs = ranks_of.run(
            lambda rank, backend: there_and_back(backend, UBatch(), parts[rank], rank * LOCAL)
        )
    for out, part in zip(outs, parts, strict=True):
        assert same_bits(out, alone(2, part, "fp8_b128"))
        assert not same_bits(out, alone(2, part))


@EVERY_BACKEND
def test_rows_of_an_expert_are_ordered_by_rank_token_and_k(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    ids = [rng.integers(-1, 2 * LOCAL, (9, TOP_K)) for _ in range(2)]

    def work(rank: int, backend: All2All) -> list[list[float]]:
        x = torch.arange(9.0)[:, None].expand(-1, WIDTH) + 100 * rank
        routing = Routing(torch.from_numpy(ids[rank].astype(np.int32)), torch.ones(9, TOP_K))
        ubatch = UBatch()
        ticket = backend.dispatch(x.contiguous(), routing, ubatch).wait()
        rows = [
            part.tolist()
            for part in np.split(ticket.inbound.x[:, 0].numpy(), np.asarray(ticket.inbound.ends_e))
        ][:LOCAL]
        backend.combine(ticket, ticket.inbound.x, torch.empty(9, WIDTH), ubatch).wait()
        return rows

    with group(name, torch.float32, 2, str(tmp_path)) as ranks_of:
        for rank, rows in enumerate(ranks_of.run(work)):
            for expert in range(LOCAL):
                wanted = [
                    100.0 * r + t
                    for r in (0, 1)
                    for t in range(9)
                    for i in ids[r][t]
                    if i == rank * LOCAL + expert
                ]
                assert rows[expert] == wanted


@EVERY_BACKEND
@pytest.mark.parametrize("ubatches", [1, 2])
def test_two_in_flight_do_not_mix(name: str, ubatches: int, tmp_path: Path) -> None:
    parts = [
        [batch(ids, torch.float32, r + 10 * n) for r, ids in enumerate(cases(2)[case])]
        for n, case in enumerate(("uneven", "holes"))
    ]

    def work(rank: int, backend: All2All) -> list[Tensor]:
        own = [UBatch(0), UBatch(1) if ubatches == 2 else UBatch(0)]
        outs = [torch.full_like(by_rank[rank][0], torch.nan) for by_rank in parts]
        for _ in range(2 if name in INTERPRETED else 5):
            sent = [
                backend.dispatch(*by_rank[rank], ubatch)
                for by_rank, ubatch in zip(parts, own, strict=True)
            ]
            for pending in sent:
                pending.launch_receive()
                pending.launch_receive()
            tickets = [pending.wait() for pending in sent]
            ys = [experts(ticket.inbound, rank * LOCAL) for ticket in tickets]
            back = [backend.combine(*each) for each in zip(tickets, ys, outs, own, strict=True)]
            for pending in back:
                pending.wait()
        return outs

    with group(name, torch.float32, 2, str(tmp_path), ubatches=ubatches) as ranks_of:
        for rank, outs in enumerate(ranks_of.run(work)):
            for out, by_rank in zip(outs, parts, strict=True):
                assert same_bits(out, alone(2, by_rank[rank]))


@EVERY_BACKEND
def test_a_ticket_serves_once(name: str, tmp_path: Path) -> None:
    part = batch(cases(1)["uneven"][0], torch.float32, 0)

    def work(rank: int, backend: All2All) -> None:
        ubatch = UBatch()
        ticket = backend.dispatch(*part, ubatch).wait()
        backend.combine(ticket, ticket.inbound.x, torch.empty_like(part[0]), ubatch).wait()
        with pytest.raises(RuntimeError, match="combined already"):
            backend.combine(ticket, ticket.inbound.x, torch.empty_like(part[0]), ubatch)

    with group(name, torch.float32, 1, str(tmp_path)) as ranks_of:
        ranks_of.run(work)


@EVERY_BACKEND
def test_a_rank_that_never_comes_is_named(name: str, tmp_path: Path) -> None:
    parts = [batch(ids, torch.float32, r) for r, ids in enumerate(cases(3)["uneven"])]

    def work(rank: int, backend: All2All) -> tuple[int, ...]:
        with pytest.raises(PeerLost) as caught:
            there_and_back(backend, UBatch(), parts[rank], rank * LOCAL)
        return caught.value.missing

    with group(name, torch.float32, 3, str(tmp_path), deadline_s=0.5) as ranks_of:
        named = (
            () if name == SMALL_STEPS else (1,)
        )  # there the step vote names it: no host waits for rows
        assert ranks_of.run(work, [0, 2]) == [named, named]


@EVERY_BACKEND
@pytest.mark.parametrize("who", [0, 1])
def test_leaving_wakes_who_waits(name: str, who: int, tmp_path: Path) -> None:
    """The waiter is at a peer, or in another thread of the same rank."""
    part = batch(cases(2)["uneven"][0], torch.float32, 0)

    def work(rank: int, backend: All2All) -> None:
        with pytest.raises(PeerLost):
            there_and_back(backend, UBatch(), part, 0)
        with pytest.raises(PeerLost):
            backend.dispatch(*part, UBatch()).wait()

    with group(name, torch.float32, 2, str(tmp_path)) as ranks_of:
        threading.Timer(0.3, ranks_of.backends[who].leave).start()
        start = time.monotonic()
        ranks_of.run(work, [0])
        assert time.monotonic() - start < 15


@EVERY_BACKEND
def test_nobody_joined_yet(name: str) -> None:
    from tests.moe.contract.backends import make

    with pytest.raises(PeerLost):
        make(name, torch.float32, 2).dispatch(*batch(np.zeros((1, 1)), torch.float32, 0), UBatch())


@EVERY_BACKEND
def test_epochs_follow_each_other(name: str, tmp_path: Path) -> None:
    """The same backends join again, with other numbers of experts and fewer ranks."""
    from tests.comm.ranks import members_of, together
    from tests.moe.contract.backends import make

    backends = [make(name, torch.float32, 3) for _ in range(3)]
    for epoch, ranks in enumerate((3, 2, 1, 3), 1):
        (tmp_path / str(epoch)).mkdir()
        members = members_of(ranks, str(tmp_path / str(epoch)), epoch=epoch)
        parts = [batch(ids, torch.float32, r) for r, ids in enumerate(cases(ranks)["uneven"])]

        def work(rank: int, members=members, parts=parts) -> Tensor:  # type: ignore[no-untyped-def]
            backends[rank].join(members[rank], LOCAL, 1)
            return there_and_back(backends[rank], UBatch(), parts[rank], rank * LOCAL)

        outs = together([lambda r=r: work(r) for r in range(ranks)])  # type: ignore[misc]
        for out, part in zip(outs, parts, strict=True):
            assert same_bits(out, alone(ranks, part))
        for backend in backends:
            backend.leave()
