"""Two ranks send all of their tokens to the experts of rank 0, whose memory is measured.

    python -m tests.moe.inflow_rank BACKEND WIRE DIRECTORY STORE

Prints the largest growth of this process in bytes, and the number of tokens of a round.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moeserve.config import ParallelConfig
from moeserve.moe.all2all import registry
from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.nccl import NcclAll2All
from moeserve.moe.all2all.registry import make_backends
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from tests.comm import fake_nccl
from tests.comm.ranks import members_of
from tests.moe.contract.backends import BY_NCCL, facts_of

WIDTH = 1024
TOP_K = 2
LOCAL = 4
UBATCHES = 2
RANKS = 2
TOKENS = 5000
TURNS = 3
ROUND_BYTES = 16 << 20
DTYPE = torch.bfloat16


def peak_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) << 10


def backend_of(name: str, wire: str) -> All2All:
    if name == BY_NCCL:
        shape = {
            "hidden_size": WIDTH,
            "top_k": TOP_K,
            "max_tokens": TOKENS,
            "experts_per_rank": LOCAL,
        }
        return NcclAll2All(facts_of(DTYPE, RANKS, wire, **shape))
    (backend,) = make_backends(
        ParallelConfig(dp=RANKS, all2all=name, wire=wire),  # type: ignore[arg-type]
        hidden_size=WIDTH,
        dtype=DTYPE,
        top_k=TOP_K,
        max_tokens=TOKENS,
        experts_per_rank=LOCAL,
    )
    return backend


class Rank:
    def __init__(self, rank: int, name: str, wire: str, directory: str, store: str) -> None:
        self.backend = backend_of(name, wire)
        self.backend.join(replace(members_of(RANKS, directory)[rank], store=store), LOCAL, UBATCHES)
        self.ubatches = [UBatch(index) for index in range(UBATCHES)]

    @property
    def max_tokens(self) -> int:
        tokens = self.backend.caps.max_tokens
        assert tokens is not None
        return tokens

    def turn(self, tokens: int) -> None:
        """Both micro-batches have their rows, and results, before either sends them home."""
        x = torch.ones((tokens, WIDTH), dtype=DTYPE)
        out = torch.empty((tokens, WIDTH), dtype=DTYPE)
        routing = Routing(
            torch.tensor([[0, 1]], dtype=torch.int32).repeat(tokens, 1), torch.ones(tokens, TOP_K)
        )
        in_flight = []
        for ubatch in self.ubatches:
            ticket = self.backend.dispatch(x, routing, ubatch).wait()
            y = torch.empty_like(ticket.inbound.x) if ticket.y is None else ticket.y
            y.copy_(ticket.inbound.x)
            in_flight.append((ticket, y, ubatch))
        for one in [
            self.backend.combine(ticket, y, out, ubatch) for ticket, y, ubatch in in_flight
        ]:
            one.wait()

    def serve(self) -> None:
        self.turn(8)
        for _ in range(TURNS):
            self.turn(self.max_tokens)


def main(name: str, wire: str, directory: str, store: str) -> None:
    torch.set_num_threads(1)
    registry.ROUND_BYTES = ROUND_BYTES
    fake_nccl.use(pytest.MonkeyPatch())
    rank = Rank(0, name, wire, directory, store)
    rank.turn(8)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory
    before = peak_bytes()
    for _ in range(TURNS):
        rank.turn(rank.max_tokens)
    sys.stdout.write(f"{peak_bytes() - before} {rank.max_tokens}\n")
    sys.stdout.flush()
    sys.stdin.read()  # leaving first could cut off rows that the other rank still awaits
    rank.backend.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
