"""The selective scan of Mamba over paged states; moeserve/ops/selective_scan.py specifies it.

T tokens (padding included), C channels, N state elements per channel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.recurrence import TileMetadata

# Channels per program. They are the same for all numbers of ranks, because the bits of sums over n
# may depend on them.
CHANNELS = 32


@triton.jit(do_not_specialize=["table_stride"])
def selective_scan_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, skip_ptr, states_ptr, x_rows_ptr, dt_rows_ptr, b_rows_ptr,
    out_ptr,
    blocks_ptr, starts_ptr, offsets_ptr, x_stride, dt_stride, b_stride, c_stride, table_stride,
    C: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_C channels of one row, token by token, with states in registers.

    The scan begins at the border of the tile of the last cached token. One loop handles cached and
    new tokens, so that recomputed states have the same bits.
    """
    TILES: tl.constexpr = BLOCK_SIZE // TILE
    row = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_ptr + row)
    first_token = tl.load(offsets_ptr + row).to(tl.int64)
    end = start + (tl.load(offsets_ptr + row + 1) - first_token).to(tl.int32)
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    inside = columns < C
    inside_n = n < N
    inside_state = inside_n[:, None] & inside[None, :]
    state_offsets = n[:, None] * C + columns[None, :]
    a = tl.load(a_ptr + state_offsets, mask=inside_state, other=0.0)
    skip = tl.load(skip_ptr + columns, mask=inside, other=0.0)
    state = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    begin = tl.where(start < end, tl.maximum(start - 1, 0) // TILE * TILE, end)
    for position in range(begin, end):
        tile = position // TILE
        is_new = position >= start
        block = tl.load(blocks_ptr + row * table_stride + tile // TILES).to(tl.int64)
        if position % TILE == 0:
            border_ptr = states_ptr + (block * TILES + tile % TILES) * (N * C) + state_offsets
            if position < start:
                state = tl.load(border_ptr, mask=inside_state, other=0.0)
            elif block > 0:
                tl.store(border_ptr, state, mask=inside_state)
        token = first_token + (position - start)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        x_row = x_rows_ptr + slot * C
        dt_row = dt_rows_ptr + slot * C
        b_row = b_rows_ptr + slot * N
        x = tl.load(
            tl.where(is_new, x_ptr + token * x_stride, x_row) + columns, mask=inside, other=0.0
        )
        dt = tl.load(
            tl.where(is_new, dt_ptr + token * dt_stride, dt_row) + columns, mask=inside, other=0.0
        )
        b = tl.load(tl.where(is_new, b_ptr + token * b_stride, b_row) + n, mask=inside_n, other=0.0)
        state = tl.fma(tl.exp(dt[None, :] * a), state, b[:, None] * dt[None, :] * x[None, :])
        if position >= start:
            c = tl.load(c_ptr + token * c_stride + n, mask=inside_n, other=0.0)
            # States beyond N may be NaN (infinity times 0), so mask them.
            y = tl.sum(tl.where(inside_n[:, None], c[:, None] * state, 0.0), 0) + skip * x
            tl.store(out_ptr + token * C + columns, y, mask=inside)
            if block > 0:
                tl.store(x_row + columns, x, mask=inside)
                tl.store(dt_row + columns, dt, mask=inside)
                if tl.program_id(0) == 0:
                    tl.store(b_row + n, b, mask=inside_n)


def selective_scan(
    x_TC: Tensor,
    dt_TC: Tensor,
    a_NC: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    skip_C: Tensor,
    caches: tuple[Tensor, ...],
    plan: TileMetadata,
) -> Tensor:
    """Return y [T, C] of the scan. Padding tokens become 0.

    All tensors are fp32. Tokens may be strided.

    caches: updated in place: the states at borders [blocks, tiles, N, C], and for each token x and
        dt [blocks, block size, 1, C] and B [.., 1, N].

    Example: C 1, N 1, x [3, 5], dt 1, a ln 0.5, b and c 1, skip 10 -> [3 + 30, 0.5 * 3 + 5 + 50] =
    [33, 56.5]
    """
    tokens, channels = x_TC.shape
    state_size = len(a_NC)
    size = plan.block_size
    plan.check(
        caches,
        (size // plan.tile, state_size, channels),
        (size, 1, channels),
        (size, 1, channels),
        (size, 1, state_size),
    )
    assert dt_TC.shape == x_TC.shape, (dt_TC.shape, x_TC.shape)
    assert b_TN.shape == c_TN.shape == (tokens, state_size), (b_TN.shape, c_TN.shape)
    assert a_NC.is_contiguous(), a_NC.stride()
    assert skip_C.is_contiguous(), skip_C.stride()
    for x in (x_TC, dt_TC, a_NC, b_TN, c_TN, skip_C):
        assert (x.dtype, x.stride(-1)) == (torch.float32, 1), (x.dtype, x.stride())
    out_TC = x_TC.new_zeros((tokens, channels))
    if tokens:
        selective_scan_kernel[(triton.cdiv(channels, CHANNELS), len(plan.starts_R))](
            x_TC, dt_TC, a_NC, b_TN, c_TN, skip_C, *caches, out_TC, plan.blocks_RN, plan.starts_R,
            plan.offsets_R1,
            x_TC.stride(0), dt_TC.stride(0), b_TN.stride(0), c_TN.stride(0),
            plan.blocks_RN.stride(0),
            C=channels, N=state_size, BLOCK_SIZE=size, TILE=plan.tile,
            BLOCK_C=CHANNELS, BLOCK_N=triton.next_power_of_2(state_size), num_warps=1,
        )  # fmt: skip
    return out_TC
