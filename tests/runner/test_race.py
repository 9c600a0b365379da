"""The winner of a Gumbel race is the definition's, also where the native code is not sure of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.ops import native_rows
from moeserve.runner.sampling import noise
from moeserve.runner.sampling.native import race
from moeserve.runner.sampling.rows import row_keys

pytestmark = pytest.mark.skipif(
    not native_rows.AVAILABLE, reason="no native kernels for this machine"
)


def keys(rows: int) -> tuple[Tensor, Tensor]:
    low, high = torch.from_numpy(row_keys(np.arange(rows, dtype=np.uint64) * 7919, np.arange(rows)))
    return low, high


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("spread", [0.01, 5.0])
def test_winners(spread: float, in_blocks: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    gumbel = noise.Gumbel(6000, torch.device("cpu"))
    width = 640 if in_blocks else noise.padded(6000)
    x = torch.randn(60, width, generator=generator) * spread
    x[:, ::7] = -math.inf
    x -= x.amax(dim=-1, keepdim=True)
    blocks = torch.stack(
        [torch.randperm(93, generator=generator)[:10].sort().values for _ in range(60)]
    )
    arguments = (*keys(60), blocks if in_blocks else None)
    assert torch.equal(race(gumbel, x, *arguments), (x + gumbel(*arguments)).argmax(dim=1))


def test_rows_in_doubt_are_done_in_full() -> None:
    """Of two tokens with equal float scores the lower id wins; also a row that has NaN."""
    gumbel = noise.Gumbel(128, torch.device("cpu"))
    low, high = keys(3)
    x = torch.full((3, 128), -math.inf)
    x[:, [17, 90]] = -gumbel(low, high)[:, [17, 90]]
    x[2, 100] = math.nan
    assert native_rows.race(x, low, high, gumbel.token_hash).tolist() == [-1, -1, -1]
    assert race(gumbel, x, low, high).tolist() == [17, 17, 100]
