"""FlashAttention-3 (github.com/Dao-AILab/flash-attention, hopper/) in place of paged_attention.py:
a package of its own, imported where it is asked about, whose bits are not those of the kernels
here. It reads the same paged cache.

T tokens, R rows, N blocks per row, H heads, d width of queries and keys, v of values. In latent
attention, whose values are the first v elements of the keys, it takes queries in two parts: those
that meet the values, and the others.
"""

import importlib
import inspect
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moeserve.kernels.attention_plan import Bounds
from moeserve.kernels.configs import Config, facts_of
from moeserve.kernels.paged_attention import MOST_SPACE, AttentionShape, launch_of, tile_rows

PACKAGE = "flash_attn_interface"
FUNCTION = "flash_attn_with_kvcache"
NEEDED = (
    "q", "k_cache", "v_cache", "qv", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q",
    "softmax_scale",
    "causal", "window_size", "attention_chunk", "softcap", "num_splits",
)  # fmt: skip
HOPPER = (9, 0)
# queries of one head of keys that one of its programs takes; parts of a context
ROWS = 128
MOST_SPLITS = 128
WINS: Config = {
    "fa3": 1
}  # in tables, beside the parameters of paged_attention.py, for which it lost


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """The attention metadata of one step, for all layers of one KV group.

    lengths_R: of contexts, new tokens included. new_tokens: the most of one row. splits: the most
    parts that it cuts a context into. padding_T: which tokens no row owns; None: none.
    """

    shape: AttentionShape
    blocks_RN: Tensor
    lengths_R: Tensor
    offsets_R1: Tensor
    new_tokens: int
    splits: int
    padding_T: Tensor | None


@cache
def obstacle(device: torch.device) -> str | None:
    """Return why it cannot serve on a device; None if it can."""
    try:
        function = getattr(importlib.import_module(PACKAGE), FUNCTION, None)
    except Exception as error:  # it loads what was compiled for one torch and one CUDA
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
        return f"it serves on Hopper alone, and not on {device}"
    return None


def misfit(dim: int, v_dim: int, *, sinks: bool = False, latent: bool = False) -> str:
    """Return why it cannot attend with such heads; empty if it can.

    128, 128 -> empty; 192, 128 -> empty; 576, 512, latent -> empty; 512, 512 -> heads of width 512
    """
    if sinks:
        return "it knows no sinks"
    fits = dim == v_dim <= 256 or (128 < dim <= 192 and 96 < v_dim <= 128)
    if latent:
        fits = 256 <= v_dim <= 512 and 0 < dim - v_dim <= 64
    if fits and not dim % 8 and not v_dim % 8:
        return ""
    return f"it knows no {'latents' if latent else 'heads'} of width {dim}" + f" and {v_dim}" * (
        dim != v_dim
    )


def wins(device: torch.device, shape: AttentionShape, new_tokens: int) -> bool:
    """Return whether `moeserve tune` found it faster in steps whose longest row has so many new
    tokens. It measures no blocks of one token, as what is chosen has, nor long rows where the
    kernels here have one size of programs for all.
    """
    few, many = tile_rows(shape, invariant=False)
    is_few = new_tokens <= few // shape.group
    if shape.block_size == 1 or (few == many and not is_few):
        return False
    return bool(
        launch_of(shape, shape.dtype, few if is_few else many, facts_of(device).name).get("fa3")
    )


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
    """Compute a step's attention metadata on the device; the first arguments are those of
    `plan_attention` in paged_attention.py.

    tokens: rows of queries, of which the last may be padding if `padded`. A context is cut into no
    more parts than keep the device busy, or than there is work space for.
    """
    programs = shape.kv_heads * -(-bounds.new_tokens * shape.heads // (shape.kv_heads * ROWS))
    room = MOST_SPACE // (tokens * shape.heads * shape.v_dim)
    splits = max(1, min(facts_of(blocks_RN.device).multiprocessors // programs, room, MOST_SPLITS))
    padding_T = torch.arange(tokens, device=blocks_RN.device) >= offsets_R1[-1] if padded else None
    lengths_R = starts_R + (offsets_R1[1:] - offsets_R1[:-1])
    return FlashMetadata(
        shape, blocks_RN.int(), lengths_R, offsets_R1, bounds.new_tokens, splits, padding_T
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
    """Attend to the paged cache as `attention` of paged_attention.py does, without sinks."""
    assert sinks_H is None, "fa3 knows no sinks"
    v_d = plan.shape.v_dim
    window = plan.shape.window
    q = q_THd
    qv = None
    k = k_cache
    if k_cache.data_ptr() == v_cache.data_ptr():
        q = q_THd[..., v_d:]
        qv = q_THd[..., :v_d]
        k = k_cache[..., v_d:]
    found = getattr(importlib.import_module(PACKAGE), FUNCTION)(
        q=q, k_cache=k, v_cache=v_cache, qv=qv, cache_seqlens=plan.lengths_R,
        page_table=plan.blocks_RN,
        cu_seqlens_q=plan.offsets_R1, max_seqlen_q=plan.new_tokens, softmax_scale=1.0, causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        attention_chunk=plan.shape.chunk or 0,
        softcap=soft_cap, num_splits=plan.splits,
    ).flatten(1)  # fmt: skip
    if plan.padding_T is not None:
        found.masked_fill_(plan.padding_T[:, None], 0)
    return found if out is None else out.copy_(found)
