"""Noise is a function of seed, position and token, and it is Gumbel noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.runner.sampling import noise
from moeserve.runner.sampling.rows import row_keys

CPU = torch.device("cpu")


def keys(seeds: list[int], positions: list[int]) -> list[torch.Tensor]:
    pairs = row_keys(np.array(seeds, dtype=np.uint64), np.array(positions))
    return [torch.from_numpy(half) for half in pairs]


@pytest.mark.parametrize("vocab_size", [50, 4096, 49_155, 151_936])
def test_bits_depend_on_neither_batch_nor_threads(vocab_size: int) -> None:
    gumbel = noise.Gumbel(vocab_size, CPU)
    low, high = keys(list(range(9)), list(range(9)))
    together = gumbel(low, high).clone()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for first, last in ((0, 1), (3, 5), (2, 9), (8, 9)):
            assert torch.equal(gumbel(low[first:last], high[first:last]), together[first:last])
    assert noise.is_invariant(vocab_size)


def test_seed_position_and_token_all_change_the_noise() -> None:
    gumbel = noise.Gumbel(64, CPU)
    rows = gumbel(*keys([1, 2, 1, 2**64 - 1], [5, 5, 6, 5]))
    values = rows.flatten()
    assert len(values.unique()) == len(values)


def test_it_is_gumbel_noise() -> None:
    gumbel = noise.Gumbel(65_536, CPU)
    values = gumbel(*keys([11] * 8, list(range(8)))).flatten().double()
    # Compared with the distribution function exp(-exp(-x)) at 200 points; 3 / sqrt(n) is far out
    # for Kolmogorov.
    ordered = values.sort().values
    uniform = torch.exp(-torch.exp(-ordered))
    expected = (torch.arange(len(ordered), dtype=torch.float64) + 0.5) / len(ordered)
    assert (uniform - expected).abs().max() < 2 / len(ordered) ** 0.5
    assert values.isfinite().all()


def test_neighbouring_tokens_positions_and_seeds_are_uncorrelated() -> None:
    gumbel = noise.Gumbel(8192, CPU)
    rows = gumbel(*keys([3] * 64 + list(range(64)), list(range(64)) + [9] * 64)).double()
    rows = (rows - rows.mean()) / rows.std()
    limit = 5 / (64 * 8192) ** 0.5
    assert abs(float((rows[:63] * rows[1:64]).mean())) < limit
    assert abs(float((rows[64:127] * rows[65:]).mean())) < limit
    assert abs(float((rows[:, :-1] * rows[:, 1:]).mean())) < limit


def test_blocks_of_a_row_have_the_bits_of_the_whole_row() -> None:
    gumbel = noise.Gumbel(1000, CPU)
    low, high = keys([4, 5], [6, 7])
    whole = gumbel(low, high).clone().view(2, -1, noise.LANES)
    blocks = torch.tensor([[3, 0, 15], [1, 2, 9]])
    part = gumbel(low, high, blocks).view(2, 3, noise.LANES)
    for row in range(2):
        assert torch.equal(part[row], whole[row][blocks[row]])


def test_elementwise_pieces_cover_everything_once() -> None:
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (64, 32_768, 32_832, 65_536, 100_032, 300_032):
            x = torch.zeros(count)
            noise.each_(lambda piece: piece.add_(1), x)
            assert (x == 1).all()
