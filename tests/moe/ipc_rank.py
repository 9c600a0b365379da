"""One rank of `cuda_ipc` in a process of its own.

It uses a GPU if there is one; all ranks may share it.
"""

from __future__ import annotations

import sys

import msgspec
import torch

from moeserve.comm.members import Members
from moeserve.moe.all2all.cuda_ipc import CudaIpcAll2All
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from tests.moe.contract.backends import LOCAL, facts_of, make
from tests.moe.contract.test_contract import batch, cases, there_and_back


def main(members: Members, path: str) -> None:
    """Run two rounds of every case and save the results for the test."""
    backend = make("cuda_ipc", torch.float32, members.size)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        from moeserve.comm.cudart import CudaMemory
        from moeserve.comm.symmetric import Symmetric

        device = torch.device("cuda", members.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        facts = facts_of(torch.float32, members.size, device="cuda")
        backend = CudaIpcAll2All(facts, Symmetric(CudaMemory(device)))
    backend.join(members, LOCAL, 1)
    ubatch = UBatch()
    outs = []
    for by_rank in cases(members.size).values():
        x, routing = batch(by_rank[members.rank], torch.float32, members.rank)
        part = x.to(device), Routing(routing.ids_TK.to(device), routing.weights_TK.to(device))
        outs.append(there_and_back(backend, ubatch, part, members.rank * LOCAL).cpu())
        backend.check()  # type: ignore[attr-defined]
    torch.save(outs, path)
    backend.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(msgspec.json.decode(sys.argv[1], type=Members), sys.argv[2])
