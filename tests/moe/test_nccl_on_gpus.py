"""The collectives of real NCCL: two processes with a GPU each. Without GPUs, tests/moe/contract
runs the same backends over Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.comm.nccl import DeviceMesh
from moeserve.comm.tensor import DeviceTensor
from moeserve.errors import PeerLost
from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.nccl import NcclAll2All
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from tests.comm.ranks import members_of
from tests.moe.contract.backends import LOCAL, facts_of
from tests.moe.contract.test_contract import (
    Batch,
    alone,
    batch,
    cases,
    experts,
    same_bits,
    there_and_back,
)

ENDS_S = 20.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

PROCESS = """
import sys, msgspec
from moeserve.comm.members import Members
from tests.moe import test_nccl_on_gpus as here
getattr(here, sys.argv[1])(msgspec.json.decode(sys.argv[2], type=Members), *sys.argv[3:])
"""


def in_processes(work: str, folder: Path, *args: str, tp_size: int = 1) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, work, msgspec.json.encode(m).decode(), *args],
            env=os.environ,
        )
        for m in members_of(2, str(folder), tp_size=tp_size)
    ]
    try:
        assert [child.wait(120) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
            child.wait()


def parts_of(rank: int, dtype: torch.dtype) -> list[Batch]:
    return [batch(by_rank[rank], dtype, 7 * rank) for by_rank in cases(2).values()]


def on_gpu(part: Batch) -> Batch:
    x, routing = part
    return x.cuda(), Routing(routing.ids_TK.cuda(), routing.weights_TK.cuda())


def two_ubatches(backend: All2All, part: Batch, first: int) -> list[Tensor]:
    """The same rows in both micro-batches at once, as two halves of a step."""
    ubatches, (x, routing) = (UBatch(0), UBatch(1)), on_gpu(part)
    sent = [backend.dispatch(x, routing, ubatch) for ubatch in ubatches]
    tickets = [pending.wait() for pending in sent]
    outs = [torch.full_like(x, torch.nan) for _ in ubatches]
    ys = [experts(ticket.inbound, first) for ticket in tickets]
    back = [backend.combine(*each) for each in zip(tickets, ys, outs, ubatches, strict=True)]
    return [pending.wait() for pending in back]


def travel(members: Members, dtype: str, path: str) -> None:
    torch.cuda.set_device(members.rank)
    kind: torch.dtype = getattr(torch, dtype)
    backend = NcclAll2All(facts_of(kind, comm_sms=8))
    backend.join(members, LOCAL, 2)
    first = members.rank * LOCAL
    ubatch = UBatch()
    outs = [
        [there_and_back(backend, ubatch, on_gpu(part), first)]
        for part in parts_of(members.rank, kind)
    ]
    outs += [two_ubatches(backend, part, first) for part in parts_of(members.rank, kind)]
    torch.cuda.synchronize()
    backend.check()
    torch.save([[out.cpu() for out in each] for each in outs], f"{path}/{members.rank}.pt")
    backend.leave()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_one_rank(dtype: str, tmp_path: Path) -> None:
    in_processes("travel", tmp_path, dtype, str(tmp_path))
    for rank in range(2):
        parts = 2 * parts_of(rank, getattr(torch, dtype))
        for outs, part in zip(torch.load(tmp_path / f"{rank}.pt"), parts, strict=True):
            assert all(same_bits(out, alone(2, part)) for out in outs)


def gather(members: Members) -> None:
    torch.cuda.set_device(members.rank)
    tp = DeviceTensor(members.tp_rank, 2)
    tp.join(members)
    whole = torch.arange(5 * 6.0).view(5, 6).bfloat16().cuda()
    assert torch.equal(tp.gather_columns(whole.chunk(2, 1)[tp.rank].contiguous(), 0), whole)
    assert torch.equal(tp.gather_rows(whole.split([3, 2])[tp.rank], [3, 2], 0), whole)
    tp.check()
    tp.leave()


def test_ranks_of_an_engine_gather(tmp_path: Path) -> None:
    in_processes("gather", tmp_path, tp_size=2)


def leave(members: Members, deadline_s: str, leaves_after_s: str) -> None:
    """Leave while rank 1 never calls.

    A wait for the device ends when this rank leaves, or at NCCL's timeout.
    """
    torch.cuda.set_device(members.rank)
    mesh = DeviceMesh(replace(members, deadline_s=float(deadline_s)), 1, "test")
    mesh.connect()
    if members.rank == 0:
        mine = torch.ones(1024, device="cuda")
        mesh.all_gather(mine.new_empty(2048), mine)()
        timer = threading.Timer(float(leaves_after_s), mesh.close)
        timer.start()
        began_s = time.monotonic()
        torch.cuda.synchronize()
        assert time.monotonic() - began_s < ENDS_S
        with pytest.raises(PeerLost):
            mesh.check()
        timer.cancel()
    else:
        time.sleep(2 * ENDS_S)
    mesh.leave()


@pytest.mark.parametrize(("deadline_s", "leaves_after_s"), [("60", "1"), ("3", "60")])
def test_nobody_waits_for_ever(deadline_s: str, leaves_after_s: str, tmp_path: Path) -> None:
    in_processes("leave", tmp_path, deadline_s, leaves_after_s)
