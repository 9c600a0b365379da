"""Input preparation on the device, in the manner of vLLM's model runner.

`fill_step` computes a step's inputs from the request tables and a few words per row. `pack` and
`write` apply changes to the tables: many small writes are packed on the host, then need one copy
and one launch.

Sizes: T tokens, R rows (requests), N tokens to sample at, G KV groups, B blocks per row. T', R' and
N' are the sizes of the arrays, whose remaining entries are padding: token 0 at position 0, whose
keys and values go to KV slot 0 of the null block, and rows without tokens. V values to write, W
pieces: up to PIECE adjacent values.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1024  # entries of each array per program of `step_kernel`
PIECE = 1024  # values per program of `write_kernel`
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The inputs of a forward pass on the device: integers of any width.

    If they are slices of larger arrays, they have the same addresses in every step.
    """

    ids_T: Tensor
    positions_T: Tensor
    slot_mapping_GT: Tensor  # block * block_size + offset of each new token
    blocks_GRB: Tensor  # block table of each row
    sample_N: Tensor  # tokens that feed the LM head
    offsets_R1: Tensor  # row i owns tokens offsets[i] .. offsets[i + 1] - 1
    starts_R: Tensor  # first position of each row's new tokens

    @classmethod
    def empty(
        cls, tokens: int, rows: int, samples: int, groups: int, blocks: int, device: torch.device
    ) -> "StepArrays":
        """Allocate uninitialized arrays."""
        empty_i32 = partial(torch.empty, dtype=torch.int32, device=device)
        empty_i64 = partial(torch.empty, dtype=torch.int64, device=device)
        return cls(
            ids_T=empty_i64(tokens),
            positions_T=empty_i64(tokens),
            slot_mapping_GT=empty_i64((groups, tokens)),
            blocks_GRB=empty_i32((groups, rows, blocks)),
            sample_N=empty_i64(samples),
            offsets_R1=empty_i32(rows + 1),
            starts_R=empty_i32(rows),
        )


@dataclass(frozen=True, slots=True)
class StepWords:
    """The rows of one step, packed for one copy to the device.

    The words are slots_R, starts_R, offsets_R1 and sample_N.
    """

    words: I32
    rows: int
    tokens: int
    samples: int
    max_row_tokens: int  # the most tokens of a row

    @classmethod
    def of(
        cls, slots_R: I32, starts_R: I32, offsets_R1: I32, sample_N: NDArray[np.int64]
    ) -> "StepWords":
        """Pack the rows and the indices of the tokens to sample at.

        slots [4, 2], starts [0, 9], offsets [0, 3, 4], sample [3] -> words [4, 2, 0, 9, 0, 3, 4, 3]
        """
        words = np.concatenate((slots_R, starts_R, offsets_R1, sample_N)).astype(np.int32)
        return cls(
            words=words,
            rows=len(slots_R),
            tokens=int(offsets_R1[-1]),
            samples=len(sample_N),
            max_row_tokens=int(np.diff(offsets_R1).max()),
        )


@triton.jit
def put_tokens(
    tokens_row_ptr, blocks_row_ptr, ids_ptr, positions_ptr, slot_mapping_ptr, index, start, count,
    group,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Store ids, positions and KV slots of the new tokens with numbers `index` of a row."""
    inside = index < count
    position = start + index
    block = tl.load(blocks_row_ptr + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    kv_slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping_ptr + index, kv_slot.to(slot_mapping_ptr.dtype.element_ty), mask=inside)
    if group == 0:
        token = tl.load(tokens_row_ptr + position, mask=inside, other=0)
        tl.store(ids_ptr + index, token.to(ids_ptr.dtype.element_ty), mask=inside)
        tl.store(positions_ptr + index, position.to(positions_ptr.dtype.element_ty), mask=inside)


@triton.jit
def put_rest(
    words_ptr, ids_ptr, positions_ptr, slot_mapping_ptr, sample_ptr, offsets_ptr, starts_ptr, index,
    group,
    rows, tokens, samples, all_rows, all_tokens, all_samples,
):  # fmt: skip
    """Store padding tokens, and the arrays with one entry per row."""
    padding = tokens + index < all_tokens
    nothing = tl.zeros_like(index)
    tl.store(
        slot_mapping_ptr + tokens + index,
        nothing.to(slot_mapping_ptr.dtype.element_ty),
        mask=padding,
    )
    if group == 0:
        tl.store(ids_ptr + tokens + index, nothing.to(ids_ptr.dtype.element_ty), mask=padding)
        tl.store(
            positions_ptr + tokens + index, nothing.to(positions_ptr.dtype.element_ty), mask=padding
        )
        start = tl.load(words_ptr + rows + index, mask=index < rows, other=0)
        tl.store(starts_ptr + index, start, mask=index < all_rows)
        offset = tl.load(words_ptr + 2 * rows + index, mask=index <= rows, other=0)
        tl.store(
            offsets_ptr + index, tl.where(index <= rows, offset, tokens), mask=index <= all_rows
        )
        sample = tl.load(words_ptr + 3 * rows + 1 + index, mask=index < samples, other=0)
        tl.store(
            sample_ptr + index, sample.to(sample_ptr.dtype.element_ty), mask=index < all_samples
        )


CHANGING = (
    "slot_mapping_stride", "out_group_stride", "out_stride",
    "rows", "tokens", "samples", "all_rows", "all_tokens", "all_samples", "num_blocks",
)  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def step_kernel(
    table_ptr, blocks_ptr, words_ptr,
    ids_ptr, positions_ptr, slot_mapping_ptr, rows_ptr, sample_ptr, offsets_ptr, starts_ptr,
    table_stride, group_stride, blocks_stride, slot_mapping_stride, out_group_stride, out_stride,
    rows, tokens, samples, all_rows, all_tokens, all_samples, num_blocks,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes BLOCK tokens and BLOCK block-table entries of one row in one group.

    The programs after the last row write padding tokens and the arrays with one entry per row.
    """
    row = tl.program_id(0)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(2).to(tl.int64)
    slot_mapping_ptr += group * slot_mapping_stride
    if row == all_rows:
        put_rest(
            words_ptr, ids_ptr, positions_ptr, slot_mapping_ptr, sample_ptr, offsets_ptr,
            starts_ptr, index, group,
            rows, tokens, samples, all_rows, all_tokens, all_samples,
        )  # fmt: skip
    else:
        known_row = tl.minimum(row, rows - 1)
        slot = tl.load(words_ptr + known_row).to(tl.int64)
        start = tl.load(words_ptr + rows + known_row)
        offset = tl.load(words_ptr + 2 * rows + known_row)
        count = tl.where(row < rows, tl.load(words_ptr + 2 * rows + known_row + 1) - offset, 0)
        num_known_blocks = tl.where(row < rows, num_blocks, 0)
        blocks_row_ptr = blocks_ptr + group * group_stride + slot * blocks_stride
        put_tokens(
            table_ptr + slot * table_stride, blocks_row_ptr, ids_ptr + offset,
            positions_ptr + offset,
            slot_mapping_ptr + offset, index, start, count, group, BLOCK_SIZE,
        )  # fmt: skip
        block = tl.load(blocks_row_ptr + index, mask=index < num_known_blocks, other=0)
        out_row_ptr = rows_ptr + group * out_group_stride + row.to(tl.int64) * out_stride
        tl.store(out_row_ptr + index, block.to(rows_ptr.dtype.element_ty), mask=index < num_blocks)


def fill_step(
    table: Tensor, blocks: Tensor, block_size: int, step: StepWords, words: Tensor, out: StepArrays
) -> None:
    """Write all of `out` in one launch.

    table: int32 [slots, width], the tokens of each slot's request.
    blocks: int32 [G, slots, at least B], the block tables of each slot's request.
    words: `step.words` on the device.

    Example: slot 2 has tokens [5, 6, 7], blocks [4, 9] and block_size 2. Its row starts at position
    1 and has 2 tokens. T' = 3, R' = 2 -> ids [6, 7, 0], positions [1, 2, 0], slot mapping
    [9, 18, 0], blocks [[4, 9], [0, 0]], offsets [0, 2, 2], starts [1, 0]
    """
    all_tokens = len(out.ids_T)
    all_samples = len(out.sample_N)
    groups, all_rows, num_blocks = out.blocks_GRB.shape
    assert 0 < step.rows <= all_rows == len(out.starts_R) == len(out.offsets_R1) - 1, (
        step.rows,
        all_rows,
    )
    assert step.tokens <= all_tokens, (step.tokens, all_tokens)
    assert step.samples <= all_samples, (step.samples, all_samples)
    assert num_blocks <= blocks.shape[2], (num_blocks, blocks.shape)
    assert len(blocks) == groups == len(out.slot_mapping_GT), (blocks.shape, groups)
    assert (
        table.stride(1)
        == blocks.stride(2)
        == out.blocks_GRB.stride(2)
        == out.slot_mapping_GT.stride(1)
        == 1
    )
    longest = max(
        step.max_row_tokens, num_blocks, all_tokens - step.tokens, all_rows + 1, all_samples
    )
    step_kernel[(all_rows + 1, triton.cdiv(longest, BLOCK), groups)](
        table, blocks, words,
        out.ids_T, out.positions_T, out.slot_mapping_GT, out.blocks_GRB, out.sample_N,
        out.offsets_R1, out.starts_R,
        table.stride(0), blocks.stride(0), blocks.stride(1),
        out.slot_mapping_GT.stride(0), out.blocks_GRB.stride(0), out.blocks_GRB.stride(1),
        step.rows, step.tokens, step.samples, all_rows, all_tokens, all_samples, num_blocks,
        BLOCK_SIZE=block_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pieces"])
def write_kernel(arena_ptr, words_ptr, pieces, PIECE: tl.constexpr):
    """One program writes one piece.

    words: the destination of each piece, the index of its first value (and the number of values),
        then the values.
    """
    piece = tl.program_id(0)
    place = tl.load(words_ptr + piece).to(tl.int64)
    start = tl.load(words_ptr + pieces + piece)
    end = tl.load(words_ptr + pieces + piece + 1)
    index = tl.arange(0, PIECE)
    inside = index < end - start
    values_ptr = words_ptr + 2 * pieces.to(tl.int64) + 1
    tl.store(
        arena_ptr + place + index,
        tl.load(values_ptr + start + index, mask=inside, other=0),
        mask=inside,
    )


def pack(
    offsets_V: NDArray[np.int64], values_V: NDArray[np.int32]
) -> tuple[NDArray[np.int32], int]:
    """Pack values and their offsets as words for `write`. Return (words, number of pieces).

    Offsets must be unique.

    offsets [5, 6, 9], values [1, 2, 3] -> [5, 9, 0, 2, 3, 1, 2, 3] and 2 pieces: two values at 5,
    one at 9
    """
    assert len(offsets_V) == len(values_V), (len(offsets_V), len(values_V))
    num_values = len(offsets_V)
    jumps = np.flatnonzero(np.diff(offsets_V) != 1) + 1
    run_starts = np.concatenate(([0] if num_values else [], jumps)).astype(np.int64)
    pieces_of_run = -(-np.diff(run_starts, append=num_values) // PIECE)
    piece_of_run = np.arange(pieces_of_run.sum()) - np.repeat(
        pieces_of_run.cumsum() - pieces_of_run, pieces_of_run
    )
    starts_W = np.repeat(run_starts, pieces_of_run) + piece_of_run * PIECE
    words = np.concatenate((offsets_V[starts_W], starts_W, [num_values], values_V)).astype(np.int32)
    return words, len(starts_W)


def write(arena: Tensor, words: Tensor, pieces: int) -> None:
    """Write packed values to the arena. Both tensors are int32 on the device.

    arena of zeros [0, 0, 0, 0], words [1, 3, 0, 2, 3, 7, 8, 9], 2 pieces -> [0, 7, 8, 9]
    """
    assert arena.is_contiguous(), arena.stride()
    assert len(words) > 2 * pieces, (len(words), pieces)
    if pieces:
        write_kernel[(pieces,)](arena, words, pieces, PIECE=PIECE, num_warps=4)
