"""Attention over a paged KV cache, for prefill and decode: the launcher of attention_kernel.py.

T tokens, R rows (requests), N blocks per row, H heads, G KV heads, d width of queries and keys, v
width of values. The cache is k [blocks, block size, G, d] and v [.., v]. An int8 cache has entries
that are 4 bytes longer: the quantized values of a head, then its fp32 scale.

In multi-head latent attention (DeepSeek-V2, 2024) with absorbed queries, one KV head serves all
query heads, and its values are the first elements of its keys.
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
from moeserve.kernels.configs import Config, facts_of, tuned_config

SCALE_BYTES = 4  # of the fp32 scale in an int8 cache entry
INVARIANT_M = 64  # the smallest M of Hopper's wgmma instruction
WIDE = 256  # for keys wider than this, programs have fewer query rows and positions
MAX_SPACE_FLOATS = 1 << 26  # of the default workspace


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that are fixed by the model."""

    heads: int
    kv_heads: int
    dim: int  # of queries and keys
    v_dim: int
    block_size: int
    dtype: torch.dtype  # of queries
    window: int | None = None  # positions that a token sees, itself included; None for all
    chunk: int | None = None  # a token sees only its own chunk of this size (Llama 4)

    @property
    def group(self) -> int:
        """Query heads of a program: of one KV head, and as many as its query rows allow."""
        heads = self.heads // self.kv_heads
        max_heads = 128
        if self.dim > WIDE:
            max_heads = 16 if self.dtype == torch.float32 else 64
        return next(n for n in range(min(heads, max_heads), 0, -1) if heads % n == 0)

    @property
    def groups(self) -> int:
        """The number of groups, each of which a different program computes."""
        return self.heads // self.group

    @property
    def latent(self) -> bool:
        """Whether values are part of the keys, so that a launch needs no shared memory for them."""
        return self.dim > WIDE and self.v_dim < self.dim

    @property
    def limits(self) -> tuple[int, int]:
        """Window and chunk, EVERYTHING where there is none."""
        return (
            EVERYTHING if self.window is None else self.window,
            EVERYTHING if self.chunk is None else self.chunk,
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch of the kernel, for the rows that have few or many new tokens."""

    block_m: int  # query rows of a program
    tile: int  # tokens of a program
    flat: bool  # FLAT of `attend_kernel`
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
    """Return the query rows of a program, one number per pass.

    There is one pass for all rows, or one for rows with few new tokens and one for the others.
    """
    assert shape.heads % shape.kv_heads == 0, shape
    assert shape.v_dim <= shape.dim, shape
    min_rows = max(16, triton.next_power_of_2(shape.group))
    if shape.dtype == torch.float32:
        return [min_rows]  # fp32 does not use wgmma, so more rows gain nothing
    if invariant:
        return [max(INVARIANT_M, min_rows)]
    return [min_rows, max(128 if shape.dim <= 128 else 64, min_rows)]


def tile_positions(shape: AttentionShape, block_m: int) -> int:
    """Return the positions of a KV tile: as many as shared memory and registers allow."""
    if shape.dtype == torch.float32:
        return 32 if shape.dim <= WIDE else 16
    return 64 if shape.dim <= WIDE or (shape.latent and block_m == 64) else 32


def space_floats(shape: AttentionShape, bounds: Bounds, invariant: bool = True) -> int:
    """Return the workspace size, in fp32 numbers, that allows every long context to be cut.

    With less workspace some contexts are not cut, which is slower with the same bits.
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

    Row i owns tokens offsets_R1[i] .. offsets_R1[i+1]-1, which begin at position starts_R[i].

    blocks_RN: the block tables, padded with 0.
    starts_R, offsets_R1: int32.
    invariant: make a token's bits independent of the number of new tokens in its row. Otherwise
        rows with few and with many new tokens are computed by programs of different size, which may
        round differently.
    space: fp32 workspace, see `space_floats`.
    """
    assert blocks_RN.stride(1) == 1, blocks_RN.stride()
    assert SPLIT % shape.block_size == 0, shape
    if space is None:
        space = torch.empty(
            min(space_floats(shape, bounds, invariant), MAX_SPACE_FLOATS), device=blocks_RN.device
        )
    sizes = tile_rows(shape, invariant)
    passes: list[Pass] = []
    min_new = 1  # new tokens of the rows of a pass
    for block_m in sizes:
        tile = block_m // shape.group
        max_new = ANY if block_m == sizes[-1] else tile
        capacity = space.numel() // (shape.groups * block_m * row_floats(shape.v_dim))
        if min_new <= bounds.new_tokens:
            work = list_work(
                starts_R,
                offsets_R1,
                bounds,
                tile,
                *shape.limits,
                capacity=capacity,
                least=min_new,
                most=max_new,
            )
            passes.append(Pass(block_m=block_m, tile=tile, flat=min_new > 1, work=work))
        min_new = max_new + 1
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
    """Attend to the paged cache, and return [T, H * v] of q's dtype; padding tokens become zero.

    q_THd: already scaled; the heads of a token must be contiguous.
    v_cache: a view of `k_cache` if the values are the first elements of the keys.
    soft_cap: scores become soft_cap * tanh(score / soft_cap), unless it is 0.
    sinks_H: fp32, one score per head that adds weight but no value.
    config: launch parameters; by default those of `launch_of` for each pass.

    Example: one head of width 1, q 1, keys [0, ln 3], values [4, 8] -> (4 + 3 * 8) / (1 + 3) = [7]
    """
    tokens, heads, d = q_THd.shape
    shape = plan.shape
    v_d = shape.v_dim
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
    quantized = k_cache.dtype == torch.int8
    shared = v_d < d and v_cache.stride() == k_cache.stride()
    assert not (quantized and shared), "an int8 entry has one scale"
    assert k_cache.is_contiguous(), k_cache.stride()
    if shared:
        assert v_cache.data_ptr() == k_cache.data_ptr(), "values are not part of the keys"
    else:
        assert v_cache.is_contiguous(), v_cache.stride()
    for cache, width in ((k_cache, d), (v_cache, v_d)):
        entry = width + SCALE_BYTES if quantized else width
        assert cache.shape[1:] == (shape.block_size, shape.kv_heads, entry), (cache.shape, shape)
        assert cache.dtype == (torch.int8 if quantized else q_THd.dtype), (cache.dtype, q_THd.dtype)
    if out is None:
        out = q_THd.new_empty((tokens, heads * v_d))
    assert out.shape == (tokens, heads * v_d), (out.shape, shape)
    assert out.is_contiguous(), out.stride()
    scales = [cache.view(torch.float32) if quantized else None for cache in (k_cache, v_cache)]
    window, chunk = shape.limits
    device, multiprocessors = facts_of(q_THd.device)
    for part in plan.passes:
        launch = config or launch_of(shape, k_cache.dtype, part.block_m, device)
        slots = plan.space.numel() // (shape.groups * part.block_m * row_floats(v_d))
        values, stats = split_space(plan.space, slots * shape.groups * part.block_m, v_d)
        programs = min(
            part.work.items_I4.shape[0] * shape.groups, launch["programs"] * multiprocessors
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
            num_warps=launch["num_warps"], num_stages=launch["num_stages"],
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
    """Merge the splits of all cut tiles of a pass into out [T, H * v]."""
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
    """Return the launch parameters.

    They depend on the model, not on the step, because the result's bits may depend on them.

    num_stages: half of the stages buffer keys and values; the others load their block numbers.
    programs: per multiprocessor.
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
    return tuned_config("paged_attention", device, shape_of(shape, cache_dtype), block_m, default)


def shape_of(shape: AttentionShape, cache_dtype: torch.dtype) -> str:
    """Return the shape's key in the config tables."""
    width = f"D{shape.dim}" if shape.v_dim == shape.dim else f"D{shape.dim}-{shape.v_dim}"
    return f"G{shape.group} {width} {shape.dtype} {cache_dtype}".replace("torch.", "")
