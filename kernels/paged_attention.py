"""Attention over a paged cache, for prefill and decode alike.

T tokens, R rows (requests), N blocks per row, H heads, G KV heads, h = H / G, d head width, w a window. A token at
position p sees positions p-w+1 .. p. The cache is k, v [blocks, block size, G, d], or int8 entries [.., d + 4]: the
whole numbers of a head and the bytes of its fp32 scale. attention_kernel.py has the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from moeserve.kernels.attention_kernel import attend_kernel
from moeserve.kernels.attention_plan import ANY, EVERYTHING, SPLIT, Bounds, WorkList, list_work, most_slots
from moeserve.kernels.attention_sums import (
    merge,
    row_floats,
    split_space,
)
from moeserve.kernels.configs import Config, tuned
from moeserve.kernels.devices import facts_of

SCALE_BYTES = 4
INVARIANT_M = 64  # the smallest that Hopper's own matrix instruction takes
MOST_SPACE = 1 << 26  # fp32 numbers of work space, if the caller brings none


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that a model fixes.

    dtype: of queries. window: positions that a token sees, itself included; None for all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    window: int | None = None

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def reach(self) -> int:
        """The window as a number."""
        return EVERYTHING if self.window is None else self.window


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch: the rows whose work it has, in tiles of `tile` tokens, block_m query rows; flat: see the kernel."""

    block_m: int
    tile: int
    flat: bool
    work: WorkList


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The attention metadata of one step, shared by all layers of one KV group."""

    shape: AttentionShape
    blocks_RN: Tensor
    starts_R: Tensor
    offsets_R1: Tensor
    passes: Sequence[Pass]
    space: Tensor


def _tile_rows(shape: AttentionShape, invariant: bool) -> list[int]:
    """Query rows of a program: for any number of tokens, or for few and for more."""
    assert shape.heads % shape.kv_heads == 0, shape
    assert shape.group <= 128, shape
    least = max(16, triton.next_power_of_2(shape.group))
    if shape.dtype == torch.float32:
        return [least]  # no matrix instruction would use more rows better
    if invariant:
        return [max(INVARIANT_M, least)]
    return [least, max(128 if shape.head_dim <= 128 else 64, least)]


def space_floats(shape: AttentionShape, bounds: Bounds, invariant: bool = True) -> int:
    """The work space with which every long context is cut; with less, some are not: slower, with the same bits."""
    group_floats = shape.kv_heads * row_floats(shape.head_dim)
    sizes = _tile_rows(shape, invariant)
    return max(most_slots(bounds, shape.reach, m // shape.group) * m * group_floats for m in sizes)


def plan_attention(
    blocks_RN: Tensor,
    starts_R: Tensor,
    offsets_R1: Tensor,
    shape: AttentionShape,
    bounds: Bounds,
    *,
    invariant: bool = True,
    space: Tensor | None = None,
) -> AttentionMetadata:
    """Computes a step's attention metadata on the device.

    Row i owns tokens offsets_R1[i] .. offsets_R1[i+1]-1, from position starts_R[i] on (int32); its block table is
    padded with 0. invariant: a token's bits do not depend on how many new tokens its row has; else small and large
    numbers take programs of different size, which may round otherwise. space: fp32 work space, see `space_floats`.
    """
    assert blocks_RN.stride(1) == 1, blocks_RN.stride()
    assert SPLIT % shape.block_size == 0, shape
    if space is None:
        space = torch.empty(min(space_floats(shape, bounds, invariant), MOST_SPACE), device=blocks_RN.device)
    sizes = _tile_rows(shape, invariant)
    passes: list[Pass] = []
    least = 1
    for block_m in sizes:
        tile = block_m // shape.group
        most = ANY if block_m == sizes[-1] else tile
        capacity = space.numel() // (shape.kv_heads * block_m * row_floats(shape.head_dim))
        if least <= bounds.new_tokens:
            work = list_work(starts_R, offsets_R1, bounds, tile, shape.reach, capacity, least, most)
            passes.append(Pass(block_m, tile, least > 1, work))
        least = most + 1
    return AttentionMetadata(shape, blocks_RN, starts_R, offsets_R1, passes, space)


def attention(
    q_THd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionMetadata,
    *,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Attends to the paged cache: [T, H * d] of q's dtype, zero in tokens that no row owns.

    q_THd: already scaled; heads of a token lie side by side. soft_cap: scores become soft_cap * tanh(score / soft_cap);
    0 leaves them. sinks_H: fp32, one score per head that takes weight and gives no value. config: default that of
    `launch_of` for each pass.
    one head of width 1, q 1, keys [0, ln 3], values [4, 8] -> (4 + 3 * 8) / (1 + 3) = [7]
    """
    tokens, heads, d = q_THd.shape
    entry = d + SCALE_BYTES if k_cache.dtype == torch.int8 else d
    assert (heads, d, q_THd.dtype) == (plan.shape.heads, plan.shape.head_dim, plan.shape.dtype), (q_THd, plan.shape)
    assert q_THd.stride()[1:] == (d, 1), q_THd.stride()
    for cache in (k_cache, v_cache):
        assert cache.shape[1:] == (plan.shape.block_size, plan.shape.kv_heads, entry), (cache.shape, plan.shape)
        assert cache.dtype in (q_THd.dtype, torch.int8), (cache.dtype, q_THd.dtype)
        assert cache.is_contiguous(), cache.stride()
    if out is None:
        out = q_THd.new_empty((tokens, heads * d))
    for part in plan.passes:
        how = config or launch_of(plan.shape, k_cache.dtype, part.block_m, facts_of(q_THd.device).name)
        _launch(q_THd, k_cache, v_cache, plan, part, soft_cap, sinks_H, out, how)
    return out


def launch_of(shape: AttentionShape, cache_dtype: torch.dtype, block_m: int, device: str) -> Config:
    """Launch parameters. They depend on what the model fixes, not on the step, because bits may depend on them.

    num_stages: half of them buffer keys and values, since those wait for block numbers. programs: per multiprocessor.
    """
    if shape.dtype == torch.float32:
        default = {"num_warps": 4, "num_stages": 2, "programs": 8}
    elif block_m < 64:
        default = {"num_warps": 4, "num_stages": 5 if shape.head_dim <= 128 else 3, "programs": 8}
    else:
        warps = 4 if block_m == 64 and shape.head_dim <= 128 and cache_dtype != torch.int8 else 8
        default = {"num_warps": warps, "num_stages": 3 if shape.head_dim <= 128 else 2, "programs": 32}
    return tuned("paged_attention", device, shape_of(shape, cache_dtype), block_m, default)


def shape_of(shape: AttentionShape, cache_dtype: torch.dtype) -> str:
    """The shape's name in tables of configurations."""
    return f"G{shape.group} D{shape.head_dim} {shape.dtype} {cache_dtype}".replace("torch.", "")


def _launch(
    q_THd: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionMetadata, part: Pass, soft_cap: float,
    sinks_H: Tensor | None, out: Tensor, config: Config,
) -> None:  # fmt: skip
    shape, d = plan.shape, plan.shape.head_dim
    slots = plan.space.numel() // (shape.kv_heads * part.block_m * row_floats(d))
    values, stats = split_space(plan.space, slots * shape.kv_heads * part.block_m, d)
    quantised = k_cache.dtype == torch.int8
    programs = min(
        part.work.items_I4.shape[0] * shape.kv_heads, config["programs"] * facts_of(q_THd.device).multiprocessors
    )
    attend_kernel[(programs,)](
        q_THd, k_cache, v_cache, k_cache.view(torch.float32) if quantised else None,
        v_cache.view(torch.float32) if quantised else None, sinks_H, out, values, stats, plan.blocks_RN, plan.starts_R,
        plan.offsets_R1, part.work.items_I4, part.work.counts_2, plan.starts_R.shape[0], q_THd.shape[0],
        q_THd.stride(0), plan.blocks_RN.stride(0),
        KV_HEADS=shape.kv_heads, GROUP=shape.group, D=d, D_PAD=max(16, triton.next_power_of_2(d)),
        ENTRY=k_cache.shape[3], BLOCK_SIZE=shape.block_size, WINDOW=shape.reach, SOFT_CAP=soft_cap, SPLIT=SPLIT,
        TILE=part.tile, BLOCK_M=part.block_m, BLOCK_N=32 if q_THd.dtype == torch.float32 else 64, FLAT=part.flat,
        num_warps=config["num_warps"], num_stages=config["num_stages"],
    )  # fmt: skip
    merge(
        values, stats, sinks_H, out, plan.offsets_R1, part.work,
        shape.kv_heads, shape.group, part.tile, d, part.block_m,
    )  # fmt: skip
