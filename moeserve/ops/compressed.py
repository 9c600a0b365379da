"""The rows of earlier tokens in paged states, and entries that summarize windows of tokens.

Attention to the last tokens and to compressed entries reads them (blocks/compressed_attention.py).

A state has, for each tile of TILE tokens, a row for each of the tile's tokens, and the N rows
before the tile (its border). So the rows of the last N tokens are those of one block and of the
step's own tokens. A tile with the null block is not cached: only the same step reads its rows.

`History.extend` returns all these rows in one tensor: a row of zeros, the borders, the cached rows,
and the step's own rows. `RowIndex` finds the row of a position.

Shapes: R rows (requests) of the step, T tokens of the step without padding, N rows of a border, B
tiles that begin in the step, W windows that become complete in the step, n tokens of a window, V
values of a token, d width of an entry, K entries of a query.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.ops.elementwise import exp
from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.ops.rules import TILE

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowMembers:
    """RowMembers of the rows of a step: of each, its row, and a number, such as its position."""

    rows: Tensor
    numbers: Tensor

    @classmethod
    def of(cls, first_R: I64, end_R: I64, device: torch.device) -> "RowMembers":
        """Return the numbers first[r] .. end[r] - 1 of each row r, row after row.

        [3, 0], [5, 1] -> rows [0, 0, 1], numbers [3, 4, 0]
        """
        counts_R = np.maximum(end_R - first_R, 0)
        rows = np.repeat(np.arange(len(counts_R)), counts_R)
        before_R = np.cumsum(counts_R) - counts_R
        numbers = np.arange(len(rows)) + (first_R - before_R)[rows]
        return cls(torch.from_numpy(rows).to(device), torch.from_numpy(numbers).to(device))

    def where(self, is_kept: Tensor) -> "RowMembers":
        """Return some of the members."""
        return RowMembers(self.rows[is_kept], self.numbers[is_kept])


@dataclass(frozen=True, slots=True, eq=False)
class RowIndex:
    """Finds the row of a position in the result of `History.extend`."""

    num_before: int  # N
    # For each row of the step: its first position, the first position of the tile that the
    # previous token is in, and the indices of its first cached row and of its first own row
    starts_R: Tensor
    bases_R: Tensor
    cached_R: Tensor
    own_R: Tensor

    def __call__(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the indices of positions of the step's rows; of negative positions 0."""
        starts = self.starts_R[rows]
        bases = self.bases_R[rows]
        own = self.own_R[rows] + positions - starts
        cached = self.cached_R[rows] + positions - bases
        before = 1 + (rows + 1) * self.num_before + positions - bases
        index = torch.where(positions >= bases, cached, before)
        return torch.where(positions >= starts, own, index).masked_fill(positions < 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The places of the rows of a step's tokens and of those before them."""

    index: RowIndex
    borders: tuple[Tensor, Tensor]  # block, and index in the block, of each row's previous token
    cached_slots: Tensor  # of the rows from the begin of that tile on
    kept: tuple[Tensor, Tensor]  # the tokens whose rows are cached, and their slots
    new_borders: tuple[Tensor, Tensor]  # of the tiles that begin in the step
    new_index_BN: Tensor  # and the rows of these borders

    def extend(self, own_TV: Tensor, cache: Tensor, border_cache: Tensor) -> Tensor:
        """Write the tokens' rows to the cache, and return all rows, fp32.

        own_TV: of the step's tokens. cache: [blocks, block size, 1, V]. border_cache: [blocks,
        tiles, N, V].
        """
        width = own_TV.shape[1]
        own_TV = own_TV.float()
        cache_rows = cache.view(-1, width)
        before = border_cache[self.borders].view(-1, width)
        cached = cache_rows.index_select(0, self.cached_slots)
        rows = torch.cat((own_TV.new_zeros((1, width)), before, cached, own_TV))
        tokens, slots = self.kept
        cache_rows.index_copy_(0, slots, own_TV.index_select(0, tokens))
        border_cache[self.new_borders] = rows[self.new_index_BN]
        return rows


def plan_history(group: GroupInputs, step: StepInputs, num_before: int) -> History:
    """Find the rows of a step. group: of the states. num_before: N."""
    device = group.blocks_RN.device
    starts_R = step.starts_R.astype(np.int64)
    offsets_R1 = step.offsets_R1.astype(np.int64)
    ends_R = starts_R + np.diff(offsets_R1)
    bases_R = np.maximum(starts_R - 1, 0) // TILE * TILE
    num_cached_R = starts_R - bases_R
    first_cached = 1 + len(starts_R) * num_before
    cached_R = first_cached + np.cumsum(num_cached_R) - num_cached_R
    own_R = first_cached + num_cached_R.sum() + offsets_R1[:-1]
    index = RowIndex(
        num_before,
        *(torch.from_numpy(x).to(device) for x in (starts_R, bases_R, cached_R, own_R)),
    )
    previous = RowMembers.of(bases_R // TILE, bases_R // TILE + 1, device)
    begun = RowMembers.of(-(-starts_R // TILE), -(-ends_R // TILE), device)
    begun = begun.where(_tiles(group, begun)[0] > 0)
    positions_BN = begun.numbers[:, None] * TILE + torch.arange(-num_before, 0, device=device)
    tokens = (group.slot_mapping_T >= group.block_size).nonzero()[:, 0]
    return History(
        index=index,
        borders=_tiles(group, previous),
        cached_slots=_slots(group, RowMembers.of(bases_R, starts_R, device)),
        kept=(tokens, group.slot_mapping_T[tokens]),
        new_borders=_tiles(group, begun),
        new_index_BN=index(begun.rows[:, None], positions_BN),
    )


def _tiles(group: GroupInputs, tiles: RowMembers) -> tuple[Tensor, Tensor]:
    """Return the block of each tile, and the tile's index in the block."""
    per_block = group.block_size // TILE
    return group.blocks_RN[tiles.rows, tiles.numbers // per_block], tiles.numbers % per_block


def _slots(group: GroupInputs, positions: RowMembers) -> Tensor:
    """Return the cache slot of each position."""
    blocks = group.blocks_RN[positions.rows, positions.numbers // group.block_size]
    return blocks * group.block_size + positions.numbers % group.block_size


def entry_slots(group: GroupInputs, entries: RowMembers, every: int) -> Tensor:
    """Return the cache slot of each entry: it is in the block of its last token.

    group: of the entries. every: tokens per entry.
    """
    size = group.block_size
    last = (entries.numbers + 1) * every - 1
    blocks = group.blocks_RN[entries.rows, last // size]
    return blocks * -(-size // every) + last % size // every


def compress(values_WnV: Tensor, scores_WnV: Tensor) -> Tensor:
    """Return the sums of a window's values, weighted by the softmax of scores per column, [W, V].

    Sums run in the order of the tokens. values [[[1], [3]]], scores [[[0], [0]]] -> [[2]].
    """
    powers_WnV = exp((scores_WnV - scores_WnV.amax(1, keepdim=True)).contiguous())
    total_WV = powers_WnV[:, 0]
    sum_WV = powers_WnV[:, 0] * values_WnV[:, 0]
    for i in range(1, values_WnV.shape[1]):
        total_WV = total_WV + powers_WnV[:, i]
        sum_WV = sum_WV + powers_WnV[:, i] * values_WnV[:, i]
    return sum_WV / total_WV


def rotate_last(x_THd: Tensor, cos_Tp: Tensor, sin_Tp: Tensor) -> Tensor:
    """Rotate the last elements of each head, in adjacent pairs. All tensors are fp32.

    cos_Tp, sin_Tp: one number for each pair. For example x [5, 1, 0], angle 90 degrees ->
    [5, 0, 1].
    """
    size = 2 * cos_Tp.shape[1]
    first = x_THd[..., -size::2]
    second = x_THd[..., -size + 1 :: 2]
    cos = cos_Tp[:, None]
    sin = sin_Tp[:, None]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((x_THd[..., :-size], rotated.flatten(-2)), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a step: their rows and positions, on the host and on the device."""

    rows_T: I64
    positions_T: I64
    members: RowMembers

    @classmethod
    def of(cls, step: StepInputs, device: torch.device) -> "Tokens":
        starts_R = step.starts_R.astype(np.int64)
        ends_R = starts_R + np.diff(step.offsets_R1)
        members = RowMembers.of(starts_R, ends_R, device)
        return cls(members.rows.cpu().numpy(), members.numbers.cpu().numpy(), members)


def as_requests(
    group: GroupInputs, step: StepInputs, tokens: Tokens, index: RowIndex, window: int,
    entries_TK: Tensor, num_entries_T: I64,
) -> tuple[GroupInputs, StepInputs]:  # fmt: skip
    """Return a group and a step in which each token is a request of its own, whose context is the
    rows of its window, followed by its entries.

    The cache has one row per block: those of `History.extend`, followed by the entries.

    entries_TK: the indices of the entries in this cache. num_entries_T: how many of them a token
        has.
    """
    device = entries_TK.device
    positions_T1 = tokens.members.numbers[:, None]
    first_T1 = (positions_T1 - (window - 1)).clamp(min=0)
    in_window_T1 = positions_T1 - first_T1 + 1
    places = torch.arange(window + entries_TK.shape[1], device=device)
    blocks_TN = index(tokens.members.rows[:, None], (first_T1 + places).minimum(positions_T1))
    if entries_TK.shape[1]:
        in_entries = (places - in_window_T1).clamp(0, entries_TK.shape[1] - 1)
        blocks_TN = blocks_TN.where(places < in_window_T1, entries_TK.gather(1, in_entries))
    counts_T = np.minimum(tokens.positions_T + 1, window) + num_entries_T
    starts_T = (counts_T - 1).astype(np.int32)
    offsets = np.arange(len(starts_T) + 1, dtype=np.int32)
    on_device = (torch.from_numpy(starts_T).to(device), torch.from_numpy(offsets).to(device))
    rows = replace(step, starts_R=starts_T, offsets_R1=offsets, rows_on_device=on_device)
    seen = torch.arange(blocks_TN.shape[1], device=device) < on_device[0][:, None] + 1
    blocks_TN = blocks_TN.masked_fill(~seen, 0)
    return replace(group, blocks_RN=blocks_TN.contiguous(), block_size=1, window=None), rows
