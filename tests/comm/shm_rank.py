"""A tensor-parallel rank as a process: gathers until its peers are gone.

python -m tests.comm.shm_rank DIRECTORY RANK SIZE
"""

from __future__ import annotations

import sys

import torch

from moeserve.comm.shm import ShmTensor
from moeserve.errors import PeerLost
from tests.comm.ranks import members_of


def main(directory: str, rank: int, size: int) -> None:
    tensor = ShmTensor(rank, size)
    tensor.join(members_of(size, directory, tp_size=size)[rank])
    try:
        while True:
            tensor.gather_columns(torch.ones(2, 3), 0)
    except PeerLost as lost:
        sys.stdout.write(f"{lost}\n")
    tensor.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
