"""Attention over a paged cache, for prefill and decode alike.

T tokens, R rows (requests), N blocks per row, H heads, G KV heads, d width of queries and keys, v
of values. The cache is k [blocks, block size, G, d] and v [.., v], or int8 entries of 4 more: the
whole numbers of a head and the bytes of its fp32 scale. In multi-head latent attention
(DeepSeek-V2, 2024) with absorbed queries, one KV head serves all heads and its values are the first
elements of its keys. attention_kernel.py has the kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from moeserve.kernels.attention_kernel import attend_kernel
from moeserve.kernels.attention_plan import (
    ANY,
    EVERYTHING,
    SPLIT,
    Bounds,
    WorkList,
    list_work,
    most_slots,
)
from moeserve.kernels.attention_sums import merge_kernel, row_floats, split_space
from moeserve.kernels.configs import Config, facts_of, tuned

SCALE_BYTES = 4
INVARIANT_M = 64  # the smallest that Hopper's own matrix instruction takes
WIDE = 256  # elements of a key; programs of wider ones have fewer query rows and positions
MOST_SPACE = 1 << 26  # fp32 numbers of work space, if the caller brings none


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that a model fixes.

    dim: of queries and keys. dtype: of queries. window: positions that a token sees, itself
    included. chunk: a token sees the positions of its own chunk of so many (Llama-4). None for all.
    """

    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    block_size: int
    dtype: torch.dtype
    window: int | None = None
    chunk: int | None = None

    @property
    def group(self) -> int:
        """Query heads of a program, all of one KV head: as many as its query rows can be."""
        heads = self.heads // self.kv_heads
        most = 128
        if self.dim > WIDE:
            most = 16 if self.dtype == torch.float32 else 64
        return next(n for n in range(min(heads, most), 0, -1) if heads % n == 0)

    @property
    def groups(self) -> int:
        """Programs that share a token's heads."""
        return self.heads // self.group

    @property
    def latent(self) -> bool:
        """Whether launches count on values that are part of the keys, and need no room of their
        own.
        """
        return self.dim > WIDE and self.v_dim < self.dim

    @property
    def limits(self) -> tuple[int, int]:
        """Window and chunk as numbers."""
        return (
            EVERYTHING if self.window is None else self.window,
            EVERYTHING if self.chunk is None else self.chunk,
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch: the rows whose work it has, in tiles of `tile` tokens, block_m query rows; flat:
    see the kernel.
    """

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


def tile_rows(shape: AttentionShape, invariant: bool) -> list[int]:
    """Query rows of a program: for any number of tokens, or for few and for more."""
    assert shape.heads % shape.kv_heads == 0, shape
    assert shape.v_dim <= shape.dim, shape
    least = max(16, triton.next_power_of_2(shape.group))
    if shape.dtype == torch.float32:
        return [least]  # no matrix instruction would use more rows better
    if invariant:
        return [max(INVARIANT_M, least)]
    return [least, max(128 if shape.dim <= 128 else 64, least)]


def tile_positions(shape: AttentionShape, block_m: int) -> int:
    """Positions of a KV tile: as many as fit beside queries and sums in shared memory and
    registers.
    """
    if shape.dtype == torch.float32:
        return 32 if shape.dim <= WIDE else 16
    return 64 if shape.dim <= WIDE or (shape.latent and block_m == 64) else 32


def space_floats(shape: AttentionShape, bounds: Bounds, invariant: bool = True) -> int:
    """The work space with which every long context is cut; with less, some are not: slower, with
    the same bits.
    """
    row = shape.groups * row_floats(shape.v_dim)
    sizes = tile_rows(shape, invariant)
    return max(most_slots(bounds, min(shape.limits), m // shape.group) * m * row for m in sizes)


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
    """Compute a step's attention metadata on the device.

    Row i owns tokens offsets_R1[i] .. offsets_R1[i+1]-1, from position starts_R[i] on (int32); its
    block table is padded with 0. invariant: a token's bits do not depend on how many new tokens its
    row has; else small and large numbers take programs of different size, which may round
    otherwise. space: fp32 work space, see `space_floats`.
    """
    assert blocks_RN.stride(1) == 1, blocks_RN.stride()
    assert SPLIT % shape.block_size == 0, shape
    if space is None:
        space = torch.empty(
            min(space_floats(shape, bounds, invariant), MOST_SPACE), device=blocks_RN.device
        )
    sizes = tile_rows(shape, invariant)
    passes: list[Pass] = []
    least = 1
    for block_m in sizes:
        tile = block_m // shape.group
        most = ANY if block_m == sizes[-1] else tile
        capacity = space.numel() // (shape.groups * block_m * row_floats(shape.v_dim))
        if least <= bounds.new_tokens:
            work = list_work(
                starts_R, offsets_R1, bounds, tile, *shape.limits, capacity, least, most
            )
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
    """Attend to the paged cache: [T, H * v] of q's dtype, zero in tokens that no row owns.

    q_THd: already scaled; heads of a token lie side by side. v_cache: a view of k_cache where the
    values are the first elements of the keys. soft_cap: scores become soft_cap * tanh(score /
    soft_cap); 0 leaves them. sinks_H: fp32, one score per head that takes weight and gives no
    value. config: default that of `launch_of` for each pass. one head of width 1, q 1, keys [0, ln
    3], values [4, 8] -> (4 + 3 * 8) / (1 + 3) = [7]
    """
    (tokens, heads, d), shape, v_d = q_THd.shape, plan.shape, plan.shape.v_dim
    assert (heads, d, q_THd.dtype) == (shape.heads, shape.dim, shape.dtype), (
        q_THd.shape,
        q_THd.dtype,
        shape,
    )
    assert q_THd.stride()[1:] == (d, 1), q_THd.stride()
    if sinks_H is not None:
        assert (sinks_H.shape, sinks_H.stride(), sinks_H.dtype) == (
            (heads,),
            (1,),
            torch.float32,
        ), sinks_H
    quantised = k_cache.dtype == torch.int8
    shared = v_d < d and v_cache.stride() == k_cache.stride()
    assert not (quantised and shared), "an int8 entry has one scale"
    assert k_cache.is_contiguous(), k_cache.stride()
    assert v_cache.data_ptr() == k_cache.data_ptr() if shared else v_cache.is_contiguous(), (
        v_cache.stride()
    )
    for cache, width in ((k_cache, d), (v_cache, v_d)):
        entry = width + SCALE_BYTES if quantised else width
        assert cache.shape[1:] == (shape.block_size, shape.kv_heads, entry), (cache.shape, shape)
        assert cache.dtype == (torch.int8 if quantised else q_THd.dtype), (cache.dtype, q_THd.dtype)
    if out is None:
        out = q_THd.new_empty((tokens, heads * v_d))
    assert out.shape == (tokens, heads * v_d), (out.shape, shape)
    assert out.is_contiguous(), out.stride()
    scales = [cache.view(torch.float32) if quantised else None for cache in (k_cache, v_cache)]
    window, chunk = shape.limits
    device, multiprocessors = facts_of(q_THd.device)
    for part in plan.passes:
        how = config or launch_of(shape, k_cache.dtype, part.block_m, device)
        slots = plan.space.numel() // (shape.groups * part.block_m * row_floats(v_d))
        values, stats = split_space(plan.space, slots * shape.groups * part.block_m, v_d)
        programs = min(
            part.work.items_I4.shape[0] * shape.groups, how["programs"] * multiprocessors
        )
        attend_kernel[(programs,)](
            q_THd, k_cache, None if shared else v_cache, *scales, sinks_H, out, values, stats,
            plan.blocks_RN,
            plan.starts_R, plan.offsets_R1, part.work.items_I4, part.work.counts_2,
            plan.starts_R.shape[0], tokens,
            q_THd.stride(0), plan.blocks_RN.stride(0),
            KV_HEADS=shape.kv_heads, GROUPS=shape.groups, HEADS=shape.group, D=d, V_D=v_d,
            BLOCK_SIZE=shape.block_size,
            WINDOW=window, CHUNK=chunk, SOFT_CAP=soft_cap, SPLIT=SPLIT, TILE=part.tile,
            BLOCK_M=part.block_m,
            BLOCK_N=tile_positions(shape, part.block_m), FLAT=part.flat,
            num_warps=how["num_warps"], num_stages=how["num_stages"],
        )  # fmt: skip
        _merge(values, stats, sinks_H, out, plan, part)
    return out


def _merge(
    values: Tensor,
    stats: Tensor,
    sinks_H: Tensor | None,
    out: Tensor,
    plan: AttentionMetadata,
    part: Pass,
) -> None:
    """Write the tokens of all tiles that a pass has cut to out [T, H * v]."""
    shape = plan.shape
    work = part.work
    rows = 4
    if not work.merges_M4.shape[0]:
        return
    merge_kernel[(work.merges_M4.shape[0], shape.groups * part.block_m // rows)](
        values, stats, sinks_H, out, plan.offsets_R1, work.merges_M4, work.counts_2,
        GROUPS=shape.groups, HEADS=shape.group, TILE=part.tile, D=shape.v_dim,
        BLOCK_M=part.block_m, ROWS=rows,
        UNROLL=4, num_warps=4,
    )  # fmt: skip


def launch_of(shape: AttentionShape, cache_dtype: torch.dtype, block_m: int, device: str) -> Config:
    """Launch parameters. They depend on what the model fixes, not on the step, because bits may
    depend on them.

    num_stages: half of them buffer keys and values, since those wait for block numbers. programs:
    per multiprocessor.
    """
    if shape.dtype == torch.float32:
        default = {"num_warps": 4, "num_stages": 2, "programs": 8}
    elif block_m < 64:
        default = {
            "num_warps": 4,
            "num_stages": 5 if shape.dim <= 192 or shape.latent else 3,
            "programs": 8,
        }
    else:
        warps = 4 if block_m == 64 and shape.dim <= 128 and cache_dtype != torch.int8 else 8
        default = {"num_warps": warps, "num_stages": 3 if shape.dim <= 128 else 2, "programs": 32}
    return tuned("paged_attention", device, shape_of(shape, cache_dtype), block_m, default)


def shape_of(shape: AttentionShape, cache_dtype: torch.dtype) -> str:
    """The shape's name in tables of configurations."""
    width = f"D{shape.dim}" if shape.v_dim == shape.dim else f"D{shape.dim}-{shape.v_dim}"
    return f"G{shape.group} {width} {shape.dtype} {cache_dtype}".replace("torch.", "")
