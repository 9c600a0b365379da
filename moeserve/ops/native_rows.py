"""Native (C++) functions with the signatures of ops/elementwise.py, and sampling. CPU tensors only.

Bits differ from the reference where it rounds more often (SwiGLU) or adds in another order (sums of
squares and of exponentials). Rows must be contiguous. A small call takes two microseconds, mostly
for its tensors.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.ops import elementwise
from moeserve.ops.elementwise import HeadRule
from moeserve.ops.inputs import LayerCache, RopeCacheInputs, entry_width
from moeserve.ops.latent import LatentRule
from moeserve.ops.native import native
from moeserve.ops.rules import SWIGLU, Activation, RouterRule

_native: Any = native()
AVAILABLE = _native is not None and bool(_native.supported_isas())
_empty = torch.empty
_FLOATS = ("float32", "bfloat16", "float16") if AVAILABLE else ()
_ELEMENTS = {getattr(torch, name): getattr(_native.Element, name) for name in _FLOATS}
TYPES = {getattr(torch, name): getattr(_native.Type, name) for name in _FLOATS}
KV_TYPES = TYPES | ({torch.int8: _native.Type.int8} if AVAILABLE else {})  # of KV caches


def address(x: Tensor | None) -> int:
    """Return the address of a tensor's first element; 0 for None."""
    return 0 if x is None else x.data_ptr()


def _stride(x: Tensor) -> int:
    """Return the elements between the starts of two rows. Rows must be contiguous."""
    stride, step = x.stride()
    assert step == 1 or x.shape[1] == 1, (x.shape, x.stride())
    return stride


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of each row, in x's dtype; see ops/elementwise.py."""
    rows, width = x_TD.shape
    out_TD = _empty((rows, width), dtype=x_TD.dtype)
    _native.rms_norm(
        TYPES[x_TD.dtype],
        rows,
        width,
        x_TD.data_ptr(),
        _stride(x_TD),
        weight_D.data_ptr(),
        eps,
        out_TD.data_ptr(),
    )
    return out_TD


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Overwrite x with rms_norm(x + residual) and residual with the sum, and return both."""
    rows, width = x_TD.shape
    assert residual_TD.shape == x_TD.shape, (x_TD.shape, residual_TD.shape)
    assert residual_TD.dtype is x_TD.dtype, (x_TD.dtype, residual_TD.dtype)
    x_TD = x_TD.contiguous()
    residual_TD = residual_TD.contiguous()
    x = x_TD.data_ptr()
    residual = residual_TD.data_ptr()
    assert x != residual or not rows, "x and residual must be different tensors"
    _native.add_rms_norm(
        TYPES[x_TD.dtype],
        rows,
        width,
        x,
        width,
        residual,
        width,
        weight_D.data_ptr(),
        eps,
        x,
        residual,
    )
    return x_TD, residual_TD


def qk_norm_rope_cache(
    qkv_TN: Tensor,
    rule: HeadRule,
    rope_cache: RopeCacheInputs,
    cache: LayerCache,
    normed_THd: Tensor | None = None,
) -> Tensor:
    """Apply norms and rope, and write the KV cache, in one call; see ops/elementwise.py."""
    cos_T1d, sin_T1d, slot_mapping_T = rope_cache
    k_cache, v_cache = cache
    rows = len(qkv_TN)
    heads = rule.num_heads
    groups = rule.num_kv_heads
    dim = cos_T1d.shape[2]
    v_dim = rule.v_dim or dim
    assert qkv_TN.shape[1] == (heads + groups) * dim + groups * v_dim, (qkv_TN.shape, rule, dim)
    assert k_cache.dtype is v_cache.dtype, (k_cache.dtype, v_cache.dtype)
    assert k_cache.dtype in (qkv_TN.dtype, torch.int8), (k_cache.dtype, qkv_TN.dtype)
    assert k_cache.shape[2:] == (groups, entry_width(dim, k_cache.dtype)), (k_cache.shape, dim)
    assert v_cache.shape[2:] == (groups, entry_width(v_dim, k_cache.dtype)), (v_cache.shape, v_dim)
    q_THd = _empty((rows, heads, dim), dtype=qkv_TN.dtype)
    _native.qk_norm_rope_cache(
        TYPES[qkv_TN.dtype], rows, slot_mapping_T.shape[0], heads, groups, dim, v_dim,
        qkv_TN.data_ptr(),
        _stride(qkv_TN), address(normed_THd), address(rule.norms), rule.norm_last,
        rule.norm_values, rule.eps,
        rule.clip, cos_T1d.data_ptr(), sin_T1d.data_ptr(), rule.scale, slot_mapping_T.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(), KV_TYPES[k_cache.dtype], q_THd.data_ptr(),
    )  # fmt: skip
    return q_THd


def latent_rope_cache(
    q_THe: Tensor,
    kv_TC: Tensor,
    rule: LatentRule,
    rope_cache: RopeCacheInputs,
    latent_cache: Tensor,
    q_THC: Tensor,
) -> Tensor:
    """Apply the norm of latents and rope, and write the cache, in one call; see ops/latent.py.

    q_THC must be contiguous.
    """
    cos_T1p, sin_T1p, slot_mapping_T = rope_cache
    rows = len(q_THe)
    heads = rule.num_heads
    width = rule.nope_dim + rule.rope_dim
    entry = rule.rank + rule.rope_dim
    assert q_THe.shape[1:] == (heads, width), (q_THe.shape, rule)
    assert q_THe.stride()[1:] == (width, 1), q_THe.stride()
    assert kv_TC.shape == (rows, entry), (kv_TC.shape, rule)
    assert q_THC.shape == (rows, heads, entry), (q_THC.shape, rule)
    assert q_THC.is_contiguous(), q_THC.stride()
    assert latent_cache.is_contiguous(), latent_cache.stride()
    assert latent_cache.shape[2:] == (1, entry), (latent_cache.shape, rule)
    assert cos_T1p.shape[2] == rule.rope_dim, (cos_T1p.shape, rule)
    assert q_THe.dtype is kv_TC.dtype is q_THC.dtype is latent_cache.dtype, (
        kv_TC.dtype,
        latent_cache.dtype,
    )
    q_THn = _empty((rows, heads, rule.nope_dim), dtype=q_THe.dtype)
    _native.latent_rope_cache(
        TYPES[q_THe.dtype], rows, slot_mapping_T.shape[0], heads, rule.nope_dim, rule.rope_dim,
        rule.rank,
        q_THe.data_ptr(), q_THe.stride(0), kv_TC.data_ptr(), _stride(kv_TC),
        rule.norm_L.data_ptr(), rule.eps,
        cos_T1p.data_ptr(), sin_T1p.data_ptr(), rule.scale, slot_mapping_T.data_ptr(),
        latent_cache.data_ptr(),
        q_THn.data_ptr(), q_THC.data_ptr(),
    )  # fmt: skip
    return q_THn


def native_activation(rule: Activation) -> Any:
    """Return the native object for an activation."""
    assert not rule.capped, rule
    # Hashing the rule for the cache would take as long as a small call.
    return _SWIGLU if rule is SWIGLU else _native_activation(rule)


@lru_cache
def _native_activation(rule: Activation) -> Any:
    kinds = _native.ActivationKind
    return _native.Activation(
        kind=kinds.swiglu if rule.plain else getattr(kinds, rule.kind), alpha=rule.alpha,
        gate_limit=rule.gate_limit,
        act_limit=rule.act_limit, up_limit=rule.limit, up_shift=rule.up_shift,
    )  # fmt: skip


_SWIGLU = _native_activation(SWIGLU) if AVAILABLE else None


def act_mul(gate_up_MI: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up of [M, 2I], [M, I], or act of [M, I]; see ops/elementwise.py."""
    if activation.capped:
        return elementwise.act_mul(gate_up_MI, activation, torch.get_num_threads())
    rows = gate_up_MI.shape[0]
    width = gate_up_MI.shape[1] // activation.parts
    out_MI = _empty((rows, width), dtype=gate_up_MI.dtype)
    _native.act_mul(
        TYPES[gate_up_MI.dtype], rows, width, gate_up_MI.data_ptr(), _stride(gate_up_MI),
        native_activation(activation), out_MI.data_ptr(),
    )  # fmt: skip
    return out_MI


def sigmoid_gate(logits_TL: Tensor) -> Tensor:
    """Return the sigmoid of the first column, fp32 [T, 1]."""
    out_T1 = _empty((logits_TL.shape[0], 1))
    _native.sigmoid_gate(
        TYPES[logits_TL.dtype],
        logits_TL.shape[0],
        logits_TL.data_ptr(),
        logits_TL.stride(0),
        out_T1.data_ptr(),
    )
    return out_T1


def embedding(ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the rows `ids_T` (int64) of the embedding table."""
    assert ids_T.dtype is torch.int64, ids_T.dtype
    return _rows(weight_VD, ids_T, 1)


def can_route(rule: RouterRule) -> bool:
    """Return whether the native kernels have this rule's scores."""
    return hasattr(_native.RouteScore, rule.score)


@lru_cache
def native_rule(rule: RouterRule) -> Any:
    """Return the native object for a router's rule."""
    return _native.RouteRule(
        score=getattr(_native.RouteScore, rule.score), groups=rule.groups,
        kept_groups=rule.kept_groups,
        group_scores=rule.num_group_scores, renormalize=rule.renormalize, epsilon=rule.epsilon,
        floor=rule.floor,
        scale=rule.scale, jitter=rule.jitter,
    )  # fmt: skip


def check_per_expert(per_E: Tensor | None, num_experts: int) -> None:
    """Assert that a tensor is fp32 [E], or None."""
    assert per_E is None or (per_E.dtype, per_E.shape, per_E.is_contiguous()) == (
        torch.float32,
        (num_experts,),
        True,
    )


def route(
    logits_TE: Tensor,
    top_k: int,
    rule: RouterRule,
    bias_E: Tensor | None = None,
    expert_scale_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the top_k experts of each token and their weights; see ops/elementwise.py."""
    if not can_route(rule):
        return elementwise.route(logits_TE, top_k, rule, bias_E, expert_scale_E)
    rows, experts = logits_TE.shape
    check_per_expert(bias_E, experts)
    check_per_expert(expert_scale_E, experts)
    ids_TK = _empty((rows, top_k), dtype=torch.int32)
    weights_TK = _empty((rows, top_k))
    _native.route(
        TYPES[logits_TE.dtype], rows, experts, top_k, logits_TE.data_ptr(), _stride(logits_TE),
        native_rule(rule), address(bias_E), address(expert_scale_E), ids_TK.data_ptr(),
        weights_TK.data_ptr(),
    )  # fmt: skip
    return ids_TK, weights_TK


def group_pairs(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Return (order_P, place_N, counts_e) of a `Grouping` (moe/all2all/layout.py)."""
    assert ids_TK.dtype is torch.int32, ids_TK.dtype
    assert ids_TK.is_contiguous(), ids_TK.stride()
    num_pairs = ids_TK.numel()
    order_N = _empty(num_pairs, dtype=torch.int64)
    place_N = _empty(num_pairs, dtype=torch.int64)
    counts_e = np.empty(num_experts, np.int64)
    num_placed = _native.group_pairs(
        ids_TK.data_ptr(), num_pairs, counts_e, order_N.data_ptr(), place_N.data_ptr()
    )
    order_P = order_N if num_placed == num_pairs else order_N[:num_placed]
    return order_P, place_N, counts_e


def rows_of_pairs(x_TD: Tensor, order_P: Tensor, top_k: int) -> Tensor:
    """Return the activation of the token of each (token, expert) pair t * top_k + k, [P, D]."""
    return _rows(x_TD.contiguous(), order_P, top_k)


def sum_pairs(y_PD: Tensor, place_N: Tensor, weights_TK: Tensor, out_TD: Tensor) -> Tensor:
    """Set out[t] to the sum over k of weights[t, k] * y[place[t * K + k]]; place -1 adds zero.

    Terms are added in fp32, in the order of k.
    """
    tokens, top_k = weights_TK.shape
    assert y_PD.dtype is out_TD.dtype, (y_PD.dtype, out_TD.dtype)
    assert all(x.is_contiguous() for x in (y_PD, weights_TK, out_TD)), (
        y_PD.stride(),
        out_TD.stride(),
    )
    _native.sum_pairs(
        _ELEMENTS[y_PD.dtype], tokens, top_k, y_PD.shape[1], y_PD.data_ptr(), place_N.data_ptr(),
        weights_TK.data_ptr(),
        out_TD.data_ptr(),
    )  # fmt: skip
    return out_TD


def _rows(from_XD: Tensor, index_P: Tensor, divisor: int) -> Tensor:
    """Return the rows index // divisor of a matrix, [P, D]."""
    assert from_XD.is_contiguous(), from_XD.stride()
    assert index_P.is_contiguous(), index_P.stride()
    count = index_P.shape[0]
    width = from_XD.shape[1]
    out_PD = _empty((count, width), dtype=from_XD.dtype)
    row_bytes = width * from_XD.itemsize
    _native.copy_rows(
        from_XD.data_ptr(),
        from_XD.shape[0],
        index_P.data_ptr(),
        divisor,
        count,
        row_bytes,
        out_PD.data_ptr(),
    )
    return out_PD


def argmax(x_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (maximum, its lowest column) of each fp32 row; NaN counts as largest."""
    rows = x_SV.shape[0]
    peak_S = _empty(rows)
    column_S = _empty(rows, dtype=torch.int64)
    _native.argmax(
        rows, x_SV.shape[1], x_SV.data_ptr(), _stride(x_SV), peak_S.data_ptr(), column_S.data_ptr()
    )
    return peak_S, column_S


def draw(
    x_SV: Tensor, slots_S: NDArray[np.int64], positions_S: NDArray[np.int64],
    columns: Sequence[NDArray[Any]],
    token_hash_V: Tensor, unsupported: int, random: int,
    masks: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sample a token for each row of fp32 logits: (tokens int64, maxima, `Status` uint8).

    The token is the most likely one, or the winner of `race` at the request's temperature if the
    request has the trait `random`. The token is -1 if rounding could decide, or if the request has
    one of the traits `unsupported`: then use the reference (runner/sampling/reference.py). Logits
    are not changed.

    positions_S: the positions of the tokens.
    columns: traits (uint16), temperatures (fp32) and seeds (uint64), each by slot.
    masks: rows and bitmasks of allowed tokens, see `apply_bitmask`.
    """
    rows, width = x_SV.shape
    tokens_S = _empty(rows, dtype=torch.int64)
    peak_S = _empty(rows)
    status_S = _empty(rows, dtype=torch.uint8)
    mask_of_S = None
    bits_CW = None
    if masks is not None:
        rows_C, bits_CW = masks
        assert bits_CW.shape[1] * 32 >= width, (bits_CW.shape, x_SV.shape)
        mask_of_S = np.full(rows, -1)
        mask_of_S[rows_C] = np.arange(len(rows_C))
    _native.draw(
        width, x_SV.data_ptr(), _stride(x_SV), slots_S, positions_S, *columns, unsupported, random,
        token_hash_V.data_ptr(), mask_of_S, bits_CW, peak_S.data_ptr(), tokens_S.data_ptr(),
        status_S.data_ptr(),
    )  # fmt: skip
    return tokens_S, peak_S, status_S


def apply_bitmask(x_rV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
    """Set tokens that masks do not allow to -inf in rows of fp32 logits.

    See runner/sampling/reference.py.
    """
    count, words = bits_CW.shape
    assert rows_C.shape == (count,), (rows_C.shape, bits_CW.shape)
    assert words * 32 >= x_rV.shape[1], (words, x_rV.shape)
    assert (rows_C.dtype, bits_CW.dtype, x_rV.dtype) == (torch.int64, torch.int32, torch.float32)
    assert rows_C.is_contiguous(), rows_C.stride()
    assert bits_CW.is_contiguous(), bits_CW.stride()
    _native.apply_bitmask(
        count, x_rV.shape[1], x_rV.data_ptr(), x_rV.shape[0], _stride(x_rV), rows_C.data_ptr(),
        bits_CW.data_ptr(),
        words,
    )  # fmt: skip


def race(
    x_rV: Tensor,
    low_r: Tensor,
    high_r: Tensor,
    token_hash_V: Tensor,
    blocks_rB: Tensor | None = None,
) -> Tensor:
    """Return the column of the largest x + Gumbel noise in each row.

    The noise is that of runner/sampling/noise.py, for the keys low_r and high_r and the tokens of
    blocks_rB. A column is -1 if the rounding of fp32 logarithms could decide between two, or the
    row's maximum is not finite: then use the reference.
    """
    rows = low_r.shape[0]
    column_r = _empty(rows, dtype=torch.int64)
    _native.race(
        rows, x_rV.shape[1], x_rV.data_ptr(), _stride(x_rV), low_r.data_ptr(), high_r.data_ptr(),
        token_hash_V.data_ptr(), address(blocks_rB), column_r.data_ptr(),
    )  # fmt: skip
    return column_r
