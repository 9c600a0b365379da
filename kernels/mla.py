"""Multi-head latent attention (DeepSeek-V2, 2024) over a paged cache, for decode: all heads share one latent per token.

T tokens, R rows (requests), N blocks per row, H heads, L latent width, P width of the rotated part. The cache is
[blocks, block size, L + P]: keys are a whole entry, values its first L. Queries are absorbed: the up-projection of the
keys is already in them, and that of the values is still to come. attention_plan.py says how contexts are cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.attention_plan import (
    EVERYTHING,
    SPLIT,
    SPLIT_TILES,
    Bounds,
    WorkList,
    list_work,
    most_slots,
)
from moeserve.kernels.attention_sums import (
    LOG2E,
    LOWEST,
    merge,
    normalised,
    row_floats,
    split_space,
    within,
    zero_padding,
)
from moeserve.kernels.configs import tuned
from moeserve.kernels.devices import facts_of


@dataclass(frozen=True, slots=True)
class MlaShape:
    """The sizes that a model fixes. dtype: of queries and cache."""

    heads: int
    latent: int
    rotated: int
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class MlaPlan:
    """The attention metadata of one step. A program has block_m query rows: `heads` heads each of `tile` tokens."""

    shape: MlaShape
    blocks_RN: Tensor
    starts_R: Tensor
    offsets_R1: Tensor
    work: WorkList
    space: Tensor
    block_m: int
    heads: int
    tile: int


@triton.jit
def _latent_split(
    q, q_rotated, seen, table_ptr, cache_ptr, begin, end,
    L: tl.constexpr, P: tl.constexpr, L_PAD: tl.constexpr, P_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum over positions begin .. end-1. seen [M]: the last that a row sees."""
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    values = tl.zeros((BLOCK_M, L_PAD), tl.float32)
    columns = tl.arange(0, L_PAD)
    rotated_columns = tl.arange(0, P_PAD)
    for at in range(begin, end, BLOCK_N):
        positions = at + tl.arange(0, BLOCK_N)
        near = tl.minimum(positions, end - 1)  # what lies behind may be NaN
        block = tl.load(table_ptr + near // BLOCK_SIZE).to(tl.int64)
        entries = cache_ptr + (block * BLOCK_SIZE + near % BLOCK_SIZE)[:, None] * (L + P)
        latent = tl.load(entries + columns[None, :], mask=(columns < L)[None, :], other=0.0)
        rotated = tl.load(entries + L + rotated_columns[None, :], mask=(rotated_columns < P)[None, :], other=0.0)
        scores = tl.dot(q_rotated, tl.trans(rotated), input_precision="ieee")
        scores = tl.dot(q, tl.trans(latent), scores, input_precision="ieee")
        scores = tl.where(positions[None, :] <= seen[:, None], scores, float("-inf"))

        most = tl.maximum(largest, tl.max(scores, 1) * LOG2E)
        base = tl.maximum(most, LOWEST)
        p = tl.exp2(tl.fma(scores, LOG2E, -base[:, None]))
        old = tl.exp2(largest - base)
        weight = tl.fma(weight, old, tl.sum(p, 1))
        values = tl.dot(p.to(latent.dtype), latent, values * old[:, None], input_precision="ieee")
        largest = most
    return largest, weight, values


@triton.jit
def _latent_item(
    item, group, q_ptr, cache_ptr, out_ptr, values_ptr, stats_ptr, blocks_ptr, starts_ptr, offsets_ptr, items_ptr,
    q_stride, table_stride,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, P: tl.constexpr, L_PAD: tl.constexpr,
    P_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One work item for HEADS heads: one split, which is all that tokens see where the tile is not cut."""
    row = tl.load(items_ptr + item * 4).to(tl.int64)
    tile = tl.load(items_ptr + item * 4 + 1)
    split = tl.maximum(tl.load(items_ptr + item * 4 + 2), 0)
    slot = tl.load(items_ptr + item * 4 + 3).to(tl.int64)
    start = tl.load(starts_ptr + row)
    first_token = tl.load(offsets_ptr + row)
    new = tl.load(offsets_ptr + row + 1) - first_token
    m = tl.arange(0, BLOCK_M)
    step = tile * TILE + m // HEADS
    valid = (m < TILE * HEADS) & (step < new)
    tokens = (first_token + step).to(tl.int64)
    heads = group * HEADS + m % HEADS
    columns = tl.arange(0, L_PAD)
    rotated_columns = tl.arange(0, P_PAD)
    wanted = within(valid, columns, L)
    at = q_ptr + (tokens * q_stride + heads * (L + P))[:, None]
    q = tl.load(at + columns[None, :], mask=wanted, other=0.0)
    q_rotated = tl.load(at + L + rotated_columns[None, :], mask=within(valid, rotated_columns, P), other=0.0)

    seen = tl.where(valid, start + step, -1)
    end = tl.minimum(split * SPLIT + SPLIT, start + tl.minimum(tile * TILE + TILE, new))
    largest, weight, values = _latent_split(
        q, q_rotated, seen, blocks_ptr + row * table_stride, cache_ptr, split * SPLIT, end,
        L, P, L_PAD, P_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if slot >= 0:
        at_row = (slot * GROUPS + group) * BLOCK_M + m
        tl.store(stats_ptr + at_row * 2, largest, mask=valid)
        tl.store(stats_ptr + at_row * 2 + 1, weight, mask=valid)
        tl.store(values_ptr + at_row[:, None] * L + columns[None, :], values, mask=wanted)
    else:
        y = normalised(largest, weight, values + 0.0, None, heads, valid)  # -0.0 would not survive a merge either
        to = out_ptr + (tokens * (GROUPS * HEADS) + heads)[:, None] * L + columns[None, :]
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_stride"])
def latent_kernel(
    q_ptr, cache_ptr, out_ptr, values_ptr, stats_ptr, blocks_ptr, starts_ptr, offsets_ptr, items_ptr, counts_ptr,
    num_rows, num_tokens, q_stride, table_stride,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, P: tl.constexpr, L_PAD: tl.constexpr,
    P_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs share the items of all groups of heads: how many there are, only the device knows."""
    zero_padding(out_ptr, offsets_ptr, num_rows, num_tokens, GROUPS * HEADS * L, 1024)
    for i in range(tl.program_id(0), tl.load(counts_ptr) * GROUPS, tl.num_programs(0)):
        _latent_item(
            i // GROUPS, i % GROUPS, q_ptr, cache_ptr, out_ptr, values_ptr, stats_ptr, blocks_ptr, starts_ptr,
            offsets_ptr, items_ptr, q_stride, table_stride,
            GROUPS, HEADS, L, P, L_PAD, P_PAD, BLOCK_SIZE, SPLIT, TILE, BLOCK_M, BLOCK_N,
        )  # fmt: skip


def _tiling(shape: MlaShape, invariant: bool) -> tuple[int, int, int]:
    """(query rows of a program, heads, tokens). The device's own matrix instruction wants 64 rows."""
    if shape.dtype == torch.float32:
        block_m = 16
    else:
        block_m = 64 if invariant else min(64, max(16, triton.next_power_of_2(shape.heads)))
    heads = min(shape.heads, block_m)
    assert shape.heads % heads == 0, (shape, block_m)
    return block_m, heads, block_m // heads


def _block_n(shape: MlaShape, block_m: int) -> int:
    """Positions of a KV tile, as many as fit beside the values in registers and shared memory."""
    if shape.dtype == torch.float32:
        return 16
    return 64 if block_m == 64 else 32


def mla_space_floats(shape: MlaShape, bounds: Bounds, invariant: bool = True) -> int:
    """The work space that `plan_mla` needs."""
    block_m, heads, tile = _tiling(shape, invariant)
    return most_slots(bounds, EVERYTHING, tile) * (shape.heads // heads) * block_m * row_floats(shape.latent)


def plan_mla(
    blocks_RN: Tensor,
    starts_R: Tensor,
    offsets_R1: Tensor,
    shape: MlaShape,
    bounds: Bounds,
    *,
    invariant: bool = True,
    space: Tensor | None = None,
) -> MlaPlan:
    """Computes the attention metadata of a step on the device. Arguments as of `plan_attention`, except that rows have
    few new tokens (up to SPLIT_TILES) and the work space must be as large as `mla_space_floats` says.

    invariant: programs are as large as if there were many heads, whose matrix instruction may round otherwise.
    """
    assert bounds.new_tokens <= SPLIT_TILES, bounds
    assert blocks_RN.stride(1) == 1, blocks_RN.stride()
    block_m, heads, tile = _tiling(shape, invariant)
    floats = mla_space_floats(shape, bounds, invariant)
    if space is None:
        space = torch.empty(floats, device=blocks_RN.device)
    assert space.numel() >= floats, (space.shape, floats)
    slots = most_slots(bounds, EVERYTHING, tile)
    work = list_work(starts_R, offsets_R1, bounds, tile, EVERYTHING, slots)
    return MlaPlan(shape, blocks_RN, starts_R, offsets_R1, work, space, block_m, heads, tile)


def mla(q_THc: Tensor, cache: Tensor, plan: MlaPlan, out: Tensor | None = None) -> Tensor:
    """[T, H, L]: each head's mean of the latents, weighted by softmax; zero in tokens that no row owns.

    q_THc: [T, H, L + P], scaled and absorbed; heads of a token lie side by side.
    L = P = 1, one head, q [0, 1], entries [4, 0], [8, ln 3] -> (4 + 3 * 8) / (1 + 3) = [7]
    """
    shape, latent = plan.shape, plan.shape.latent
    width = latent + shape.rotated
    assert q_THc.shape[1:] == (shape.heads, width), (q_THc.shape, shape)
    assert q_THc.stride()[1:] == (width, 1), q_THc.stride()
    assert cache.shape[1:] == (shape.block_size, width), (cache.shape, shape)
    assert cache.is_contiguous(), cache.stride()
    assert q_THc.dtype == cache.dtype == shape.dtype, (q_THc.dtype, cache.dtype, shape)
    if out is None:
        out = q_THc.new_empty((q_THc.shape[0], shape.heads, latent))
    groups = shape.heads // plan.heads
    slots = plan.space.numel() // (groups * plan.block_m * row_floats(latent))
    values, stats = split_space(plan.space, slots * groups * plan.block_m, latent)
    large = plan.block_m == 64
    default = (
        {"num_warps": 8, "num_stages": 2, "programs": 8} if large else {"num_warps": 4, "num_stages": 5, "programs": 8}
    )
    device, multiprocessors = facts_of(q_THc.device)
    config = tuned("mla", device, f"L{latent} {shape.dtype}".replace("torch.", ""), plan.block_m, default)
    programs = min(plan.work.items_I4.shape[0] * groups, config["programs"] * multiprocessors)
    latent_kernel[(programs,)](
        q_THc, cache, out, values, stats, plan.blocks_RN, plan.starts_R, plan.offsets_R1, plan.work.items_I4,
        plan.work.counts_2, plan.starts_R.shape[0], q_THc.shape[0], q_THc.stride(0), plan.blocks_RN.stride(0),
        GROUPS=groups, HEADS=plan.heads, L=latent, P=shape.rotated, L_PAD=max(16, triton.next_power_of_2(latent)),
        P_PAD=max(16, triton.next_power_of_2(shape.rotated)), BLOCK_SIZE=shape.block_size, SPLIT=SPLIT,
        TILE=plan.tile, BLOCK_M=plan.block_m, BLOCK_N=_block_n(shape, plan.block_m),
        num_warps=config["num_warps"], num_stages=config["num_stages"],
    )  # fmt: skip
    merge(values, stats, None, out, plan.offsets_R1, plan.work, groups, plan.heads, plan.tile, latent, plan.block_m)
    return out
