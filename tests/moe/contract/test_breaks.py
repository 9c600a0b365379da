"""Whatever a rank is doing when its group breaks, it gets PeerLost, and nothing else."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeserve.errors import PeerLost
from moeserve.moe.all2all.base import All2All, Ticket
from moeserve.moe.pending import Pending
from moeserve.moe.ubatch import UBatch
from tests.comm.ranks import members_of, together
from tests.moe.contract.backends import LOCAL, NAMES, ON_CPU, group, make
from tests.moe.contract.test_contract import Batch, alone, batch, cases, experts, same_bits

RANKS = 3


def turns(
    backend: All2All, ubatches: list[UBatch], parts: list[Batch], rank: int, rng: random.Random
) -> list[Tensor]:
    """Run turns in which both micro-batches' tokens are in transit at once.

    Each micro-batch launches the other's receives, as in a step of two micro-batches.
    """
    outs = [torch.full_like(x, torch.nan) for x, _ in parts]
    sent: list[Pending[Ticket]] = []
    for ubatch, part in zip(ubatches, parts, strict=True):
        for pending in sent:
            pending.launch_receive()
        sent.append(backend.dispatch(*part, ubatch))
    tickets = [pending.wait() for pending in sent]
    ys = [experts(ticket.inbound, rank * LOCAL) for ticket in tickets]
    back: list[Pending[Tensor]] = []
    for ticket, y, out, ubatch in zip(tickets, ys, outs, ubatches, strict=True):
        for going in back:
            going.launch_receive()
        back.append(backend.combine(ticket, y, out, ubatch))
        time.sleep(rng.random() * 1e-3)
    return [pending.wait() for pending in back]


def broken(name: str, folder: Path, seed: int) -> None:
    """One epoch that ends at some moment, by one rank, and the next in which all is right."""
    rng = random.Random(seed)
    backends = [make(name, torch.float32, RANKS) for _ in range(RANKS)]
    picks = rng.choices(["uneven", "holes", "none on some", "capacity full"], k=2)
    parts = [
        [batch(cases(RANKS)[pick][r], torch.float32, r) for pick in picks] for r in range(RANKS)
    ]
    expected = [[alone(RANKS, part) for part in by_rank] for by_rank in parts]

    def serve(rank: int) -> None:
        backend = backends[rank]
        own = random.Random(seed * RANKS + rank)
        ubatches = [UBatch(index) for index in range(2)]
        try:
            for _ in range(5000):
                for out, wanted in zip(
                    turns(backend, ubatches, parts[rank], rank, own), expected[rank], strict=True
                ):
                    assert same_bits(out, wanted)
            raise AssertionError("nothing broke")
        except PeerLost:
            backend.leave()

    def once(rank: int) -> list[Tensor]:
        return turns(backends[rank], [UBatch(0), UBatch(1)], parts[rank], rank, rng)

    for epoch in (1, 2):
        directory = folder / f"{seed}-{epoch}"
        directory.mkdir()
        # A collective of Gloo may miss that its peers have left, and then takes the whole deadline.
        members = members_of(
            RANKS, str(directory), epoch=epoch, deadline_s=2.0 if epoch == 1 else 20.0
        )
        together(
            [lambda b=b, m=m: b.join(m, LOCAL, 2) for b, m in zip(backends, members, strict=True)]
        )  # type: ignore[misc]
        if epoch == 1:
            breaker = threading.Timer(rng.random() * 0.03, backends[rng.randrange(RANKS)].leave)
            breaker.start()
            together([lambda r=r: serve(r) for r in range(RANKS)], 20.0)  # type: ignore[misc]
            breaker.join()
        else:
            for outs, wanted in zip(
                together([lambda r=r: once(r) for r in range(RANKS)]), expected, strict=True
            ):  # type: ignore[misc]
                assert all(same_bits(out, want) for out, want in zip(outs, wanted, strict=True))
        for backend in backends:
            backend.leave()


@pytest.mark.parametrize("name", NAMES)
def test_a_group_that_breaks_at_any_moment(name: str, tmp_path: Path) -> None:
    for seed in range(5 if name in ON_CPU else 2):
        broken(name, tmp_path, seed)


@pytest.mark.parametrize("name", ON_CPU)  # by NCCL, a dispatch waits for all ranks
def test_a_receive_that_was_launched_for_another_ubatch_still_fails_as_a_loss(
    name: str, tmp_path: Path
) -> None:
    part = batch(cases(2)["uneven"][0], torch.float32, 0)
    with group(name, torch.float32, 2, str(tmp_path), ubatches=2) as ranks_of:
        pending = ranks_of.backends[0].dispatch(*part, UBatch(0))
        ranks_of.backends[1].leave()
        pending.launch_receive()
        pending.launch_receive()
        with pytest.raises(PeerLost):
            pending.wait()
