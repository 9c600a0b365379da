"""The table of the Triton kernels (kernels/).

Imported only if it is used, because importing triton takes half a second. Shapes: T tokens, H heads
and G KV heads of this rank, d width of a head.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.config import CacheConfig
from moeserve.errors import ConfigError
from moeserve.kernels import flash_attention, paged_attention
from moeserve.kernels.activation import act_mul
from moeserve.kernels.align import align_rows
from moeserve.kernels.attention_plan import Bounds
from moeserve.kernels.flash_attention import FlashMetadata
from moeserve.kernels.latent import index_select as index_select_kernel
from moeserve.kernels.latent import latent_rope_cache
from moeserve.kernels.linear import heads_linear, linear
from moeserve.kernels.paged_attention import AttentionMetadata, AttentionShape, attention
from moeserve.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from moeserve.kernels.recurrence import TileMetadata, causal_conv, recurrence
from moeserve.kernels.route import route
from moeserve.kernels.rows import add_rms_norm, embedding, rms_norm
from moeserve.kernels.selective_scan import selective_scan
from moeserve.ops import elementwise
from moeserve.ops.attention import MAX_SCORES
from moeserve.ops.elementwise import plain_sigmoid_gate, sigmoid_mul, soft_cap
from moeserve.ops.inputs import GroupInputs, HeadShape, RowContext, StepInputs
from moeserve.ops.latent import HeadsLinear, PackHeads, PlainHeads
from moeserve.ops.linear import LinearMethod, PlainLinear
from moeserve.ops.quantized import Quantized, Weight
from moeserve.ops.rules import TILE
from moeserve.ops.selected import MAX_QUERIES, Selection
from moeserve.ops.table import Ops
from moeserve.ops.triton_weights import WEIGHT_ONLY, obstacle, parts_of

log = logging.getLogger(__name__)
# FlashAttention may load whole blocks of this many tokens or more, and with them NaN that an
# earlier request left in the block.
MIN_WHOLE_BLOCK = 64
BLOCKS_M = (16, 32, 64, 128)  # rows per tile of possible launches


class QuantizedLinear:
    """y = x W^T + b with a weight of 4 or 8 bits: a grouped product with one expert.

    Weights are dequantized in registers. For example x [M, 64] of ones, weight [1, 64] of int8 1
    with scale 1/4, bias [5] -> [M, 1] of 21.
    """

    __slots__ = ("_bias", "_num_outputs", "_weight")

    def __init__(self, weight: Quantized, bias: Tensor | None = None) -> None:
        self._weight = WEIGHT_ONLY.lay(weight[None])
        self._bias = bias
        self._num_outputs = weight.shape[0]
        for block_m in BLOCKS_M:
            # Creates cached tables, which must not happen while a CUDA graph is captured.
            align_rows(1, block_m, weight.values.device)

    @property
    def parts(self) -> list[Tensor | None]:
        """The tensors that hold the weight and the bias."""
        return [*parts_of(self._weight), self._bias]

    def __call__(self, x_MK: Tensor, context: RowContext | None = None) -> Tensor:
        """Return x W^T + b, [M, N]."""
        rows = x_MK.shape[0]
        config = WEIGHT_ONLY.launch(rows, self._weight, x_MK)
        alignment = align_rows(rows, config["block_m"], x_MK.device)
        y_MN = x_MK.new_empty(
            (rows, self._num_outputs), dtype=x_MK.dtype if self._bias is None else torch.float32
        )
        WEIGHT_ONLY.down(x_MK, self._weight, alignment, config, y_MN)
        return y_MN if self._bias is None else (y_MN + self._bias).to(x_MK.dtype)


class ExactLinear:
    """y = x W^T + b, batch-invariant: the order of sums does not depend on the number of rows."""

    __slots__ = ("_bias_N", "_weight_NK")

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._weight_NK = _own(weight_NK)
        self._bias_N = bias_N

    def __call__(self, x_MK: Tensor, context: RowContext | None = None) -> Tensor:
        """Return x W^T + b, [M, N]."""
        y_MN: Tensor = linear(x_MK, w_NK=self._weight_NK, bias_N=self._bias_N)
        return y_MN


def pack_exact(weight: Weight, bias: Tensor | None) -> LinearMethod:
    """Pack a batch-invariant linear layer. A view of a larger tensor is copied."""
    if isinstance(weight, Quantized):
        return QuantizedLinear(weight, bias)
    return ExactLinear(weight, bias)


def _own(weight: Tensor) -> Tensor:
    """Return a contiguous weight that is not a view of a larger tensor."""
    is_view = weight.untyped_storage().nbytes() > weight.nbytes
    return (weight.clone() if is_view else weight).contiguous()


def pack_fast(weight: Weight, bias: Tensor | None) -> LinearMethod:
    """Pack a linear layer, computed by torch, or by Triton if the weight is quantized."""
    if isinstance(weight, Quantized):
        return QuantizedLinear(weight, bias)
    return PlainLinear(weight, bias)


def pack_heads(weight_HNK: Weight) -> HeadsLinear:
    """Pack products per head, for one launch, or for one launch per head if quantized."""
    if isinstance(weight_HNK, Quantized):
        return PlainHeads(weight_HNK, pack_exact)
    return partial(heads_linear, w_HNK=_own(weight_HNK))


def plan_attention(
    group: GroupInputs,
    step: StepInputs,
    shape: HeadShape,
    *,
    dtype: torch.dtype,
    exact: bool,
    by_flash: Callable[[AttentionShape, int], bool] | None = None,
) -> AttentionMetadata | FlashMetadata:
    """Return the attention metadata of a step; see `PlanAttention`.

    dtype: of queries. exact: batch-invariant. by_flash: decides whether FlashAttention computes a
    step, given the sizes and the most new tokens of a row.
    """
    counts_R = step.offsets_R1[1:] - step.offsets_R1[:-1]
    bounds = Bounds(
        rows=len(counts_R),
        tokens=int(step.offsets_R1[-1]),
        new_tokens=int(counts_R.max()),
        context=int((step.starts_R + counts_R).max()),
    )
    sizes = AttentionShape(
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        dim=shape.dim,
        v_dim=shape.v_dim,
        block_size=group.block_size,
        dtype=dtype,
        window=group.window,
        chunk=group.chunk,
    )
    inputs = group.blocks_RN, *step.rows_on_device, sizes, bounds
    if by_flash is not None and by_flash(sizes, bounds.new_tokens):
        return flash_attention.plan_attention(
            *inputs, tokens=len(step.ids_T), padded=step.live is not None
        )
    return paged_attention.plan_attention(*inputs, invariant=exact)


def with_flash_attention(ops: Ops, cache: CacheConfig, *, required: bool, misfit: str) -> Ops:
    """Return the table with FlashAttention-3, or unchanged if it is not supported.

    required: use FlashAttention in all steps (attention_backend=fa3), and raise ConfigError if it
        is not supported. Otherwise it is used in steps for which it was measured to be faster.
    misfit: why FlashAttention does not support one of the layers; empty if it supports all.
    """
    obstacle = _flash_attention_obstacle(ops, cache, misfit)
    if obstacle:
        if required:
            raise ConfigError(
                f"attention_backend=fa3: {obstacle}; or choose attention_backend: auto"
            )
        log.debug("attention by Triton, not fa3: %s", obstacle)
        return ops
    by_flash: Callable[[AttentionShape, int], bool]
    if required:
        by_flash = lambda shape, new_tokens: True  # noqa: E731
        where = ""
    else:
        by_flash = partial(flash_attention.is_faster, ops.device)
        where = " where `moeserve tune` found it faster"
    return replace(
        ops,
        description=f"{ops.description}, attention: fa3{where}",
        plan_attention=partial(plan_attention, dtype=ops.dtype, exact=False, by_flash=by_flash),
        attention=_attention_by_plan,
    )


def _flash_attention_obstacle(ops: Ops, cache: CacheConfig, misfit: str) -> str | None:
    if misfit:
        return misfit
    if ops.exact:
        return "its bits may depend on the batch; use --determinism fast"
    if ops.dtype == torch.float32:
        return f"it computes in bfloat16 and float16, not in {ops.dtype}"
    if cache.kv_cache_dtype == "int8":
        return f"it does not support a KV cache in {cache.kv_cache_dtype}"
    if cache.block_size >= MIN_WHOLE_BLOCK:
        return (
            f"it reads beyond the end of a context in blocks of {MIN_WHOLE_BLOCK} tokens and more"
        )
    return flash_attention.unsupported_reason(ops.device)


def _attention_by_plan(
    q_THd: Tensor, k_cache: Tensor, v_cache: Tensor, plan: object, **options: Any
) -> Tensor:
    kernel: Any = flash_attention.attention if isinstance(plan, FlashMetadata) else attention
    attended: Tensor = kernel(q_THd, k_cache, v_cache, plan, **options)
    return attended


def plan_tiles(group: GroupInputs, step: StepInputs) -> TileMetadata:
    """See ops/recurrence.py. The kernels compute the tiles of their tokens on the device."""
    return TileMetadata(group.blocks_RN, *step.rows_on_device, group.block_size, TILE)


def index_select(
    q_SJd: Tensor, weights_SJ: Tensor, cache: Tensor, selection: Selection, pack_heads: PackHeads
) -> Tensor:
    """See ops/selected.py."""
    queries = selection.rows_S, selection.positions_S, selection.blocks_RN
    max_queries = max(MAX_QUERIES, MAX_SCORES // selection.context // MAX_QUERIES * MAX_QUERIES)
    return index_select_kernel(
        q_SJd, weights_SJ, cache, *queries, selection.context, selection.top_k, max_queries
    )


def triton_table(device: torch.device, dtype: torch.dtype, exact: bool) -> Ops:
    """Return the table of the Triton kernels. exact: batch-invariant."""
    on_cpu = device.type == "cpu"  # Triton's interpreter; torch's CPU loops have a scalar tail
    products = "triton, batch-invariant" if exact else f"torch on {device.type}"
    others = "triton, batch-invariant" if exact else "triton"
    return Ops(
        device=device,
        dtype=dtype,
        description=f"linear: {products}, others: {others}",
        triton=True,
        exact=exact,
        pad_rows=partial(max, 1),
        pack_linear=pack_exact if exact else pack_fast,
        pack_heads=pack_heads,
        weight_obstacle=partial(obstacle, device),
        act_mul=act_mul,
        sigmoid_gate=plain_sigmoid_gate,
        sigmoid_mul=partial(sigmoid_mul, threads=1),
        soft_cap=partial(soft_cap, threads=1),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        embedding=embedding,
        route=route,
        qk_norm_rope_cache=qk_norm_rope_cache,
        latent_rope_cache=latent_rope_cache,
        sigmoid=elementwise.sigmoid if on_cpu else torch.sigmoid,
        softplus=elementwise.softplus if on_cpu else F.softplus,
        plan_tiles=plan_tiles,
        causal_conv=causal_conv,
        recurrence=recurrence,
        selective_scan=selective_scan,
        index_select=index_select,
        plan_attention=partial(plan_attention, dtype=dtype, exact=exact),
        attention=attention,
    )
