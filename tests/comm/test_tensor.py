"""Gathers between the ranks of an engine: what arrives, what need not travel, and what happens when
a rank goes.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.comm.tensor import ALONE, DeviceTensor, GlooTensor, TensorParallel
from moeserve.comm.world import share
from moeserve.errors import PeerLost
from tests.comm import fake_nccl
from tests.comm.ranks import members_of, together
from tests.warm import Program

Engine = list[TensorParallel]
Kind = type[GlooTensor]
EVERY_KIND = pytest.mark.parametrize("kind", [GlooTensor, DeviceTensor])


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """engine(size, first=0, channels=1): the joined ranks of one engine, which is the `first /
    size`-th of two.
    """
    made: Engine = []
    fake_nccl.use(monkeypatch)

    def make(
        size: int,
        kind: Kind = GlooTensor,
        *,
        first: int = 0,
        channels: int = 1,
        deadline_s: float = 20.0,
    ) -> Engine:
        members = members_of(2 * size, str(tmp_path), tp_size=size, deadline_s=deadline_s)[
            first : first + size
        ]
        ranks: Engine = [kind(rank, size, channels) for rank in range(size)]
        together([functools.partial(rank.join, m) for rank, m in zip(ranks, members, strict=True)])
        made.extend(ranks)
        return ranks

    yield make
    for rank in made:
        rank.leave()


def each(ranks: Engine, call: Callable[[TensorParallel], Any]) -> list[Any]:
    return together([functools.partial(call, rank) for rank in ranks])


@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_columns_in_rank_order(
    size: int, dtype: torch.dtype, kind: Kind, engine: Callable[..., Engine]
) -> None:
    ranks = engine(size, kind)
    for rows, columns in ((1, 1), (1, 7), (5, 3), (0, 4), (3, 0), (257, 1000)):
        whole = torch.randn(rows, size * columns).to(dtype)
        parts = [whole[:, rank * columns : (rank + 1) * columns] for rank in range(size)]
        for found in together(
            [functools.partial(tp.gather_columns, parts[tp.rank], 0) for tp in ranks]
        ):
            assert found.is_contiguous()
            assert torch.equal(found, whole)


@EVERY_KIND
@pytest.mark.parametrize("counts", [(2, 2, 1), (1, 0, 0), (0, 0, 0), (0, 5, 1), (300, 300, 299)])
def test_rows_of_uneven_counts(
    counts: tuple[int, ...], kind: Kind, engine: Callable[..., Engine]
) -> None:
    ranks = engine(3, kind)
    whole = torch.randn(sum(counts), 9).bfloat16()
    for found in each(ranks, lambda tp: tp.gather_rows(whole.split(counts)[tp.rank], counts, 0)):
        assert torch.equal(found, whole)


def test_channels_do_not_mix(engine: Callable[..., Engine]) -> None:
    """Each rank has two micro-batches, each in its own thread, in any order."""
    ranks = engine(2, channels=2)

    def ubatch(tp: TensorParallel, channel: int) -> None:
        for turn in range(50):
            value = 1000 * channel + turn
            found = tp.gather_columns(torch.full((2, 3), float(value + 100_000 * tp.rank)), channel)
            assert found[0].tolist() == [value] * 3 + [value + 100_000] * 3

    together([functools.partial(ubatch, tp, channel) for tp in ranks for channel in range(2)])


def test_what_was_sent_may_go_at_once(engine: Callable[..., Engine]) -> None:
    """A slow peer still gets the rows that a fast one dropped, and results may be written to."""
    ranks = engine(2)

    def run(tp: TensorParallel) -> None:
        for turn in range(30):
            if tp.rank:
                time.sleep(0.001)
            found = tp.gather_columns(torch.full((1, 4096), float(turn)), 0)
            assert found.eq(turn).all()
            found.zero_()

    each(ranks, run)


def test_alone_nothing_changes() -> None:
    x = torch.randn(3, 4)
    assert ALONE.gather_columns(x, 0) is x
    assert ALONE.gather_rows(x, [3], 0) is x


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [(8, 4, [2, 2, 2, 2]), (5, 4, [2, 2, 1, 0]), (1, 3, [1, 0, 0]), (0, 2, [0, 0]), (7, 1, [7])],
)
def test_shares_follow_each_other(total: int, size: int, expected: list[int]) -> None:
    parts = [list(range(total))[share(total, size, rank)] for rank in range(size)]
    assert [len(part) for part in parts] == expected
    assert [item for part in parts for item in part] == list(range(total))


def test_before_the_first_join_shapes_are_right() -> None:
    tp = GlooTensor(1, 3)
    assert tp.gather_columns(torch.ones(2, 5), 0).shape == (2, 15)
    assert tp.gather_rows(torch.ones(1, 5), [1, 1, 0], 0).shape == (2, 5)


def lost(call: Callable[[], Tensor]) -> PeerLost:
    with pytest.raises(PeerLost) as caught:
        call()
    return caught.value


@EVERY_KIND
@pytest.mark.parametrize("leaver", [0, 1])
def test_leaving_wakes_who_waits_here_and_at_the_peer(
    leaver: int, kind: Kind, engine: Callable[..., Engine]
) -> None:
    """Rank 0 waits for rank 1, which never calls; either of them leaves."""
    ranks = engine(2, kind, first=2)
    x = torch.ones(2, 2)
    began = time.monotonic()
    timer = threading.Timer(0.3, ranks[leaver].leave)
    timer.start()
    error = lost(lambda: ranks[0].gather_columns(x, 0))
    assert 0.2 < time.monotonic() - began < 15
    assert set(error.missing) <= {3}
    for tp in ranks:
        lost(functools.partial(tp.gather_columns, x, 0))
    timer.join()


def test_a_silent_rank_is_named(engine: Callable[..., Engine]) -> None:
    first, _ = engine(2, first=2, deadline_s=3.0)
    assert lost(lambda: first.gather_columns(torch.ones(1, 1), 0)).missing == (3,)


def test_join_again_after_a_loss(tmp_path: Path) -> None:
    ranks = [GlooTensor(rank, 2) for rank in range(2)]
    for epoch in (1, 2):
        folder = tmp_path / str(epoch)
        folder.mkdir()
        members = members_of(2, str(folder), tp_size=2, epoch=epoch)
        together([functools.partial(tp.join, m) for tp, m in zip(ranks, members, strict=True)])
        found = together(
            [lambda tp=tp: tp.gather_columns(torch.full((1, 1), float(tp.rank)), 0) for tp in ranks]
        )  # type: ignore[misc]
        assert all(part.tolist() == [[0.0, 1.0]] for part in found)
        ranks[1].leave()
        lost(lambda: ranks[0].gather_columns(torch.ones(1, 1), 0))


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    members = members_of(4, str(tmp_path), tp_size=2, deadline_s=3.0)
    with pytest.raises(PeerLost) as caught:
        GlooTensor(0, 2).join(members[2])
    assert caught.value.missing == (3,)


PEER = """
import sys, torch
from moeserve.comm.members import Members
from moeserve.comm.tensor import GlooTensor
tp = GlooTensor(1, 2)
tp.join(Members(epoch=1, rank=1, tp_size=2, host_of=("here",) * 2,
                directory=sys.argv[1], store="127.0.0.1:1",
                token="secret", deadline_s=20.0))
print("joined", flush=True)
while True:
    tp.gather_columns(torch.ones(4, 4), 0)
"""


def test_a_killed_rank_is_noticed_at_once(tmp_path: Path) -> None:
    with Program(PEER, str(tmp_path)) as peer:
        tp = GlooTensor(0, 2)
        tp.join(members_of(2, str(tmp_path), tp_size=2)[0])
        peer.stdout.readline()
        for _ in range(20):
            tp.gather_columns(torch.ones(4, 4), 0)
        peer.kill()
        peer.wait()
        began = time.monotonic()

        def gather_on() -> Tensor:
            while True:  # what the peer had sent before may still be there
                tp.gather_columns(torch.ones(4, 4), 0)

        assert lost(gather_on).missing == (1,)
        assert time.monotonic() - began < 15
