"""All2all through shared memory: ranks as threads must give, bit for bit, what one rank with all
experts gives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.errors import ConfigError, PeerLost
from moeserve.moe.all2all.base import Inbound, Ticket
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.all2all.wire_format import Fp8Wire
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from moeserve.ops.native import native
from tests.comm.ranks import members_of, together
from tests.moe.contract.backends import facts_of

if native() is None:
    pytest.skip("the native module was not built", allow_module_level=True)

from moeserve.moe.all2all.shm import ShmAll2All

LOCAL = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Batch = tuple[Tensor, Routing]


@contextmanager
def group(
    size: int,
    folder: Path,
    *,
    ubatches: int = 1,
    deadline_s: float = 10.0,
    dtype: torch.dtype = torch.float32,
    **facts: Any,
) -> Iterator[list[ShmAll2All]]:
    backends = [
        ShmAll2All(replace(facts_of(dtype, top_k=2, max_tokens=32), **facts)) for _ in range(size)
    ]
    members = members_of(size, str(folder), deadline_s=deadline_s)
    together(
        [
            lambda b=b, m=m: b.join(m, LOCAL, ubatches)
            for b, m in zip(backends, members, strict=True)
        ]
    )
    try:
        yield backends
    finally:
        for backend in backends:
            backend.leave()


def batch(ids_TK: Tensor, hidden: int, dtype: torch.dtype, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(len(ids_TK), hidden, generator=generator).to(dtype)
    return x_TD, Routing(ids_TK.int(), torch.rand(ids_TK.shape, generator=generator) - 0.2)


def random_ids(tokens: int, top_k: int, num_experts: int, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(num_experts)[:top_k] for _ in range(tokens)]
    return torch.tensor(np.array(rows).reshape(tokens, top_k), dtype=torch.int32)


def experts(inbound: Inbound, first: int, y: Tensor) -> Tensor:
    start = 0
    for expert, end in enumerate(inbound.ends_e.tolist()):
        y[start:end] = inbound.x[start:end] * (first + expert + 0.37)
        start = end
    return y


def round_trip(
    backend: ShmAll2All, rank: int, part: Batch, ubatch: UBatch
) -> tuple[Inbound, Tensor, Tensor]:
    x_TD, routing = part
    ticket = backend.dispatch(x_TD, routing, ubatch).wait()
    assert ticket.y is not None
    x_PD = ticket.inbound.x.clone()
    y = experts(ticket.inbound, rank * LOCAL, ticket.y)
    out = backend.combine(ticket, y, torch.full_like(x_TD, torch.nan), ubatch).wait()
    return ticket.inbound, x_PD, out


def expected(parts: list[Batch]) -> tuple[Inbound, list[Tensor]]:
    """The same on one rank that has all tokens and all experts."""
    local = LocalAll2All(LOCAL * len(parts))
    ubatch = UBatch()
    x = torch.cat([x for x, _ in parts])
    routing = Routing(
        torch.cat([r.ids_TK for _, r in parts]), torch.cat([r.weights_TK for _, r in parts])
    )
    ticket = local.dispatch(x, routing, ubatch).wait()
    y = experts(ticket.inbound, 0, torch.empty_like(ticket.inbound.x))
    out = local.combine(ticket, y, torch.empty_like(x), ubatch).wait()
    return ticket.inbound, list(out.split([len(x) for x, _ in parts]))


def check(backends: list[ShmAll2All], parts: list[Batch], ubatch: UBatch | None = None) -> None:
    calls = [
        lambda r=r: round_trip(backends[r], r, parts[r], ubatch or UBatch())
        for r in range(len(parts))
    ]
    inbound, outs = expected(parts)
    for rank, (found, x_PD, out) in enumerate(together(calls)):
        local = slice(rank * LOCAL, (rank + 1) * LOCAL)
        assert found.counts_e.tolist() == inbound.counts_e[local].tolist()
        assert found.ends_e.tolist() == np.cumsum(found.counts_e).tolist()
        begin = int(inbound.ends_e[local.start] - inbound.counts_e[local.start])
        assert torch.equal(x_PD, inbound.x[begin : begin + len(x_PD)])
        assert torch.equal(out, outs[rank])


def hostile(size: int) -> dict[str, list[Tensor]]:
    """Slot ids of every rank."""
    num = size * LOCAL
    some = [random_ids(5 + 4 * r, 2, num, r) for r in range(size)]
    holes = [ids.clone() for ids in some]
    for rank, ids in enumerate(holes):
        ids[rank % 2 :: 3, 1] = -1
        ids[1::4] = -1
    return {
        "uneven": some,
        "nobody has tokens": [torch.zeros((0, 2), dtype=torch.int32)] * size,
        "one rank has none": [torch.zeros((0, 2), dtype=torch.int32), *some[1:]],
        "only the first has tokens": [
            some[0],
            *[torch.zeros((0, 2), dtype=torch.int32)] * (size - 1),
        ],
        "all to the last expert": [torch.full((9, 2), num - 1, dtype=torch.int32)] * size,
        "all padding": [torch.full((4, 2), -1, dtype=torch.int32)] * size,
        "padding on one rank": [torch.full((4, 2), -1, dtype=torch.int32), *some[1:]],
        "holes": holes,
        "duplicates in a row": [torch.tensor([[0, 0], [num - 1, num - 1]], dtype=torch.int32)]
        * size,
        "one expert each": [random_ids(7, 1, num, r) for r in range(size)],
        "full": [random_ids(32, 2, num, r) for r in range(size)],
        "full, all to one": [torch.zeros((32, 2), dtype=torch.int32)] * size,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_routing_gives_the_bits_of_one_rank(size: int, tmp_path: Path) -> None:
    with group(size, tmp_path) as backends:
        for seed, ids in enumerate(hostile(size).values()):
            check(backends, [batch(ids[r], 24, torch.float32, 10 * seed + r) for r in range(size)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 64, 131])
def test_any_width_and_dtype(hidden: int, dtype: torch.dtype, tmp_path: Path) -> None:
    with group(2, tmp_path, hidden_size=hidden, dtype=dtype, top_k=5) as backends:
        check(backends, [batch(random_ids(20, 5, 6, r), hidden, dtype, r) for r in range(2)])


def test_rounded_wire_rounds_rows_of_every_rank_alike(tmp_path: Path) -> None:
    wire = Fp8Wire()
    with group(2, tmp_path, hidden_size=200, dtype=torch.bfloat16, wire=wire) as backends:
        parts = [batch(random_ids(20, 2, 6, r), 200, torch.bfloat16, r) for r in range(2)]
        calls = [lambda r=r: round_trip(backends[r], r, parts[r], UBatch()) for r in range(2)]
        rounded = [(wire.decode(wire.encode(x), x.dtype, 200), routing) for x, routing in parts]
        _, outs = expected(rounded)
        for (_, _, out), want in zip(together(calls), outs, strict=True):
            assert torch.equal(out, want)


def test_turns_are_reused_many_times(tmp_path: Path) -> None:
    def run(backend: ShmAll2All, rank: int, rounds: list[list[Batch]]) -> list[Tensor]:
        return [round_trip(backend, rank, parts[rank], UBatch())[2] for parts in rounds]

    rounds = [
        [
            batch(random_ids((7 * n + 3 * r) % 33, 2, 9, 100 * n + r), 24, torch.float32, n)
            for r in range(3)
        ]
        for n in range(60)
    ]
    with group(3, tmp_path) as backends:
        found = together([lambda r=r: run(backends[r], r, rounds) for r in range(3)])
    for n, parts in enumerate(rounds):
        for rank, want in enumerate(expected(parts)[1]):
            assert torch.equal(found[rank][n], want)


@pytest.mark.parametrize("backwards", [False, True])
def test_two_dispatches_in_flight(backwards: bool, tmp_path: Path) -> None:
    rounds = [
        [batch(random_ids(9 + n + r, 2, 6, n + 5 * r), 24, torch.float32, n) for r in range(2)]
        for n in range(2)
    ]

    def run(backend: ShmAll2All, rank: int) -> list[Tensor]:
        ubatch = UBatch()
        pending = [(parts[rank], backend.dispatch(*parts[rank], ubatch)) for parts in rounds]
        with pytest.raises(RuntimeError, match="two dispatches"):
            backend.dispatch(*rounds[0][rank], ubatch)
        sums = []
        for (x, _), rows in reversed(pending) if backwards else pending:
            ticket = rows.wait()
            assert ticket.y is not None
            y = experts(ticket.inbound, rank * LOCAL, ticket.y)
            sums.append(backend.combine(ticket, y, torch.empty_like(x), ubatch))
        outs = [pending.wait() for pending in sums]
        return outs[::-1] if backwards else outs

    with group(2, tmp_path) as backends:
        found = together([lambda r=r: run(backends[r], r) for r in range(2)])
    for n, parts in enumerate(rounds):
        for rank, want in enumerate(expected(parts)[1]):
            assert torch.equal(found[rank][n], want)


def test_ubatches_do_not_mix(tmp_path: Path) -> None:
    with group(2, tmp_path, ubatches=2) as backends:
        parts = [
            [batch(random_ids(12, 2, 6, n + r), 24, torch.float32, n) for r in range(2)]
            for n in range(2)
        ]
        together([lambda n=n: check(backends, parts[n], UBatch(n)) for n in range(2)])


def test_experts_may_write_anywhere_and_rows_may_be_strided(tmp_path: Path) -> None:
    parts = [batch(random_ids(6, 2, 6, r), 24, torch.bfloat16, r) for r in range(2)]

    def run(backend: ShmAll2All, rank: int) -> Tensor:
        x_TD, routing = parts[rank]
        wide = torch.zeros(6, 48, dtype=x_TD.dtype)
        wide[:, ::2] = x_TD
        ids = routing.ids_TK.t().contiguous().t().long()
        ticket = backend.dispatch(
            wide[:, ::2], Routing(ids, routing.weights_TK.t().contiguous().t()), UBatch()
        ).wait()
        y = experts(
            ticket.inbound,
            rank * LOCAL,
            torch.empty(len(ticket.inbound.x) + 3, 24, dtype=x_TD.dtype),
        )
        out = torch.zeros(6, 48, dtype=x_TD.dtype)
        found = backend.combine(ticket, y, out[:, ::2], UBatch()).wait()
        assert found.data_ptr() == out.data_ptr()
        assert not out[:, 1::2].any()
        return out[:, ::2]

    with group(2, tmp_path, dtype=torch.bfloat16) as backends:
        found = together([lambda r=r: run(backends[r], r) for r in range(2)])
    for rank, want in enumerate(expected(parts)[1]):
        assert torch.equal(found[rank], want)


def test_what_cannot_be_sent_is_refused_before_anything_is(tmp_path: Path) -> None:
    good = [batch(random_ids(5, 2, 6, r), 24, torch.float32, r) for r in range(2)]

    def refuse(backend: ShmAll2All) -> None:
        def attempt(ids: Tensor, hidden: int = 24, dtype: torch.dtype = torch.float32) -> None:
            backend.dispatch(*batch(ids, hidden, dtype, 0), UBatch())

        with pytest.raises(ValueError, match="33 tokens x 2 experts; agreed were at most 32 x 2"):
            attempt(random_ids(33, 2, 6, 0))
        with pytest.raises(ValueError, match="4 tokens x 3 experts"):
            attempt(random_ids(4, 3, 6, 0))
        with pytest.raises(IndexError, match="pair 1 has expert id 6; ids run from -1 to 5"):
            attempt(torch.tensor([[0, 6]]))
        with pytest.raises(IndexError, match="expert id -2"):
            attempt(torch.tensor([[-2, 0]]))
        with pytest.raises(ValueError, match=r"takes \[T, 24\] torch.float32"):
            attempt(torch.zeros((2, 2)), hidden=23)
        with pytest.raises(ValueError, match="bfloat16"):
            attempt(torch.zeros((2, 2)), dtype=torch.bfloat16)

    with group(2, tmp_path) as backends:
        refuse(backends[0])
        check(backends, good)  # nothing of that went out


def test_a_ticket_serves_once(tmp_path: Path) -> None:
    with group(1, tmp_path) as (backend,):
        x, routing = batch(random_ids(4, 2, 3, 0), 24, torch.float32, 0)
        pending = backend.dispatch(x, routing, UBatch())
        ticket = pending.wait()
        with pytest.raises(RuntimeError, match="out of order"):
            pending.wait()
        backend.combine(ticket, ticket.inbound.x, x, UBatch()).wait()
        with pytest.raises(RuntimeError, match="combined already"):
            backend.combine(ticket, ticket.inbound.x, x, UBatch())


def test_arrival_is_when_the_last_peer_rang(tmp_path: Path) -> None:
    def run(backend: ShmAll2All, rank: int) -> tuple[int, int, int]:
        x, routing = batch(random_ids(4, 2, LOCAL, rank), 24, torch.float32, 0)
        time.sleep(0.05 * rank)
        before = time.monotonic_ns()
        rows = backend.dispatch(x, routing, UBatch())
        rang = time.monotonic_ns()
        rows.launch_receive()
        rows.wait()
        return before, rows.arrived_ns, rang

    with group(2, tmp_path) as backends:
        (_, early, rang), (before, late, after) = together(
            [lambda r=r: run(backends[r], r) for r in range(2)]
        )
    assert before <= early <= after
    assert late <= rang
    with group(1, tmp_path) as (alone,):
        assert run(alone, 0)[1] == 0


def wait_for_rows(backend: ShmAll2All) -> Ticket:
    return backend.dispatch(*batch(random_ids(4, 2, 6, 0), 24, torch.float32, 0), UBatch()).wait()


def test_a_silent_rank_is_named_after_the_deadline(tmp_path: Path) -> None:
    with group(3, tmp_path, deadline_s=1.0) as backends:
        backends[1].dispatch(*batch(random_ids(4, 2, 6, 0), 24, torch.float32, 0), UBatch())
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 2 .*silent for 1000 ms") as lost:
            wait_for_rows(backends[0])
        assert lost.value.missing == (2,)
        assert 1 <= time.monotonic() - started < 15


def test_ranks_that_diverge_are_told_what_each_did(tmp_path: Path) -> None:
    def ahead(backend: ShmAll2All) -> None:
        ticket = wait_for_rows(backend)
        backend.combine(ticket, ticket.inbound.x, torch.empty(4, 24), UBatch()).wait()

    def astray(backend: ShmAll2All) -> None:
        wait_for_rows(backend)
        wait_for_rows(backend)

    for run in (ahead, astray):
        with (
            group(2, tmp_path) as backends,
            pytest.raises(PeerLost, match=r"diverged on \S+ 0: rank") as lost,
        ):
            together([lambda b=backends[0]: ahead(b), lambda b=backends[1], run=run: astray(b)])
        assert "did combine where" in str(lost.value) or "did dispatch where" in str(lost.value)


@pytest.mark.parametrize("who", [0, 1])
def test_leaving_wakes_waiters_here_and_there(who: int, tmp_path: Path) -> None:
    with group(2, tmp_path) as backends:
        threading.Timer(0.1, backends[who].leave).start()
        started = time.monotonic()
        with pytest.raises(
            PeerLost, match="this rank left its group" if who == 0 else "rank 1 left the group"
        ):
            wait_for_rows(backends[0])
        assert time.monotonic() - started < 15
        backends[0].leave()
        with pytest.raises(PeerLost, match="has not joined a group, or has left it"):
            wait_for_rows(backends[0])


def test_a_group_forms_again_after_leaving(tmp_path: Path) -> None:
    parts = [batch(random_ids(5, 2, 6, r), 24, torch.float32, r) for r in range(2)]
    with group(2, tmp_path) as backends:
        check(backends, parts)
        ticket_of_old = together([lambda b=b: wait_for_rows(b) for b in backends])[0]
        members = members_of(2, str(tmp_path), epoch=2)
        together(
            [lambda b=b, m=m: b.join(m, LOCAL, 1) for b, m in zip(backends, members, strict=True)]
        )
        with pytest.raises(PeerLost):
            backends[0].combine(
                ticket_of_old, ticket_of_old.inbound.x, torch.empty(4, 24), UBatch()
            )
        check(backends, parts)


def test_ranks_that_were_started_differently_do_not_meet(tmp_path: Path) -> None:
    backends = [
        ShmAll2All(facts_of(torch.float32, max_tokens=max_tokens)) for max_tokens in (32, 64)
    ]
    members = members_of(2, str(tmp_path), deadline_s=5)

    def join(rank: int) -> Callable[[], None]:
        def call() -> None:
            with pytest.raises(
                ConfigError,
                match=r"rank 0 has .*'max_tokens': 32.*|rank 1 has .*'max_tokens': 64.*",
            ):
                backends[rank].join(members[rank], LOCAL, 1)

        return call

    together([join(0), join(1)])
