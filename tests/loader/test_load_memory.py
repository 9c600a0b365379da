"""Loading needs the weights' own memory and a little more, whether or not they are converted on the
way.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.load_plan import Param, Piece, LoadPlan
from moeserve.loader.weights import Params

checkpoint = open_checkpoint(Path(sys.argv[1]))
shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
plan = LoadPlan(
    tuple(Param(name, shape) for name, shape in shapes.items()),
    tuple(Piece(name, shape, name) for name, shape in shapes.items()),
)

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.empty(2**20).fill_(1)
before = peak_bytes()
with Params(checkpoint, plan, getattr(torch, sys.argv[2]), threads=2) as lazy:
    params = dict(lazy)
print(peak_bytes() - before, sum(param.nbytes for param in params.values()))
"""
SPARE_BYTES = 40 * 2**20  # two buffers, the allocator, torch's own threads


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_is_the_weights_and_a_little_more(dtype: str, tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((2000, 5000), i / 4).bfloat16() for i in range(10)}  # 200 MB
    save_file(tensors, tmp_path / "model.safetensors")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), dtype],
        capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip
    grown, weight_bytes = map(int, run.stdout.split())
    assert weight_bytes == 10 * 2000 * 5000 * (2 if dtype == "bfloat16" else 4)
    assert grown <= 1.15 * weight_bytes + SPARE_BYTES
