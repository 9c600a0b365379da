"""Adapter of FlashAttention-3 (github.com/Dao-AILab/flash-attention, hopper/).

It can replace paged_attention.py and reads the same paged cache. FlashAttention-3 is an optional
package, imported on first use. Its results differ in some bits from those of the kernels here.

T tokens, R rows, N blocks per row, H heads, d width of queries and keys, v width of values. In
latent attention, values are the first v elements of the keys. There it takes queries in two parts:
the first v elements (`qv`), and the others.
"""

import importlib
import inspect
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moeserve.kernels.attention_plan import Bounds
from moeserve.kernels.configs import Config, facts_of
from moeserve.kernels.paged_attention import MAX_SPACE_FLOATS, AttentionShape, launch_of, tile_rows

PACKAGE = "flash_attn_interface"
FUNCTION = "flash_attn_with_kvcache"
NEEDED = (
    "q", "k_cache", "v_cache", "qv", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q",
    "softmax_scale",
    "causal", "window_size", "attention_chunk", "softcap", "num_splits",
)  # fmt: skip
HOPPER = (9, 0)  # compute capability
ROWS = 128  # query rows of one KV head that one of its programs computes
MAX_SPLITS = 128  # limit of the splits of a context
# Config tables have this entry, beside the parameters of paged_attention.py, if FA3 was faster.
FASTER: Config = {"fa3": 1}


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """The attention metadata of one step, for all layers of one KV group."""

    shape: AttentionShape
    blocks_RN: Tensor
    lengths_R: Tensor  # context lengths, new tokens included
    offsets_R1: Tensor
    new_tokens: int  # the most of one row
    splits: int  # the most splits of a context
    padding_T: Tensor | None  # whether a token is padding; None if no token is


@cache
def unsupported_reason(device: torch.device) -> str | None:
    """Return why FlashAttention-3 cannot be used on a device, None if it can."""
    try:
        function = getattr(importlib.import_module(PACKAGE), FUNCTION, None)
    except Exception as error:  # it may be compiled for another version of torch or CUDA
        return f"{PACKAGE} cannot be imported: {type(error).__name__}: {error}"
    missing = [
        name
        for name in NEEDED
        if function is None or name not in inspect.signature(function).parameters
    ]
    if missing:
        return (
            f"{FUNCTION} of {PACKAGE} does not take {missing[0]}; "
            "install FlashAttention 3.0.0 or newer"
        )
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return f"FlashAttention-3 is supported on Hopper only, not on {device}"
    return None


def misfit(dim: int, v_dim: int, *, sinks: bool = False, latent: bool = False) -> str:
    """Return why heads of these widths are not supported, empty if they are.

    128, 128 -> empty; 192, 128 -> empty; 576, 512, latent -> empty; 512, 512 -> not supported
    """
    if sinks:
        return "FlashAttention-3 does not support attention sinks"
    fits = dim == v_dim <= 256 or (128 < dim <= 192 and 96 < v_dim <= 128)
    if latent:
        fits = 256 <= v_dim <= 512 and 0 < dim - v_dim <= 64
    if fits and not dim % 8 and not v_dim % 8:
        return ""
    kind = "latents" if latent else "heads"
    widths = f"{dim}" if dim == v_dim else f"{dim} and {v_dim}"
    return f"FlashAttention-3 does not support {kind} of width {widths}"


def is_faster(device: torch.device, shape: AttentionShape, new_tokens: int) -> bool:
    """Return whether `moeserve tune` measured FlashAttention-3 to be faster if the longest row has
    `new_tokens` new tokens.

    There are no measurements for blocks of one token (sparse attention), nor for long rows if the
    kernels here have a single program size.
    """
    few, many = tile_rows(shape, invariant=False)
    is_few = new_tokens <= few // shape.group
    if shape.block_size == 1 or (few == many and not is_few):
        return False
    block_m = few if is_few else many
    return bool(launch_of(shape, shape.dtype, block_m, facts_of(device).name).get("fa3"))


def plan_attention(
    blocks_RN: Tensor,
    starts_R: Tensor,
    offsets_R1: Tensor,
    shape: AttentionShape,
    bounds: Bounds,
    *,
    tokens: int,
    padded: bool = False,
) -> FlashMetadata:
    """Compute a step's attention metadata on the device.

    A context gets no more splits than keep the device busy, and than fit into MAX_SPACE_FLOATS.

    The first arguments are those of `paged_attention.plan_attention`.
    tokens: the number of queries, padding included.
    padded: whether the last queries may be padding.
    """
    programs = shape.kv_heads * -(-bounds.new_tokens * shape.heads // (shape.kv_heads * ROWS))
    splits_in_space = MAX_SPACE_FLOATS // (tokens * shape.heads * shape.v_dim)
    splits = max(
        1, min(facts_of(blocks_RN.device).multiprocessors // programs, splits_in_space, MAX_SPLITS)
    )
    padding_T = torch.arange(tokens, device=blocks_RN.device) >= offsets_R1[-1] if padded else None
    lengths_R = starts_R + (offsets_R1[1:] - offsets_R1[:-1])
    return FlashMetadata(
        shape=shape,
        blocks_RN=blocks_RN.int(),
        lengths_R=lengths_R,
        offsets_R1=offsets_R1,
        new_tokens=bounds.new_tokens,
        splits=splits,
        padding_T=padding_T,
    )


def attention(
    q_THd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: FlashMetadata,
    *,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend to the paged cache like `paged_attention.attention`. Sinks are not supported."""
    assert sinks_H is None, "fa3 does not support sinks"
    v_d = plan.shape.v_dim
    window = plan.shape.window
    q = q_THd
    qv = None
    k = k_cache
    if k_cache.data_ptr() == v_cache.data_ptr():
        q = q_THd[..., v_d:]
        qv = q_THd[..., :v_d]
        k = k_cache[..., v_d:]
    result = getattr(importlib.import_module(PACKAGE), FUNCTION)(
        q=q, k_cache=k, v_cache=v_cache, qv=qv, cache_seqlens=plan.lengths_R,
        page_table=plan.blocks_RN,
        cu_seqlens_q=plan.offsets_R1, max_seqlen_q=plan.new_tokens, softmax_scale=1.0, causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        attention_chunk=plan.shape.chunk or 0,
        softcap=soft_cap, num_splits=plan.splits,
    ).flatten(1)  # fmt: skip
    if plan.padding_T is not None:
        result.masked_fill_(plan.padding_T[:, None], 0)
    return result if out is None else out.copy_(result)
