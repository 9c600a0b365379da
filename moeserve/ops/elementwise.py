"""References in plain torch of norms, rope, activations, embedding and routing.

Shapes: T tokens (including padding), D width, H heads and G KV heads of this rank, d width of a
head (v of values), I inner width of an expert.

Results are batch-invariant. Sums are fp32, within one row. torch's vectorized loops compute the
last few elements of each thread's range with scalar code, which may round exp() differently. So
`row_pieces` splits work such that ranges have whole rows: then a row's bits depend neither on its
index in the batch nor on the number of threads.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.ops.inputs import LayerCache, RopeCacheInputs, to_entries
from moeserve.ops.rules import Activation, RouterRule

TORCH_GRAIN = 32_768  # the least elements per thread in torch's elementwise loops
LOWEST = -(1 << 62)  # less than the key of any score
# A multiple of the elements per iteration of torch's vectorized loops, which are 16, 32 or 64.
LANES = 64


@dataclass(frozen=True, slots=True)
class HeadRule:
    """The steps between qkv and attention: norms, clipping and scaling of heads."""

    num_heads: int
    num_kv_heads: int
    scale: float  # of the softmax
    eps: float
    norms: Tensor | None = None  # fp32 weights [H + G, d] of a norm per head, queries first
    clip: float = math.inf  # the largest magnitude of normed heads and of values
    v_dim: int | None = None  # width of values; None: d
    norm_last: bool = False  # apply norms after the rotary embedding (Hunyuan)
    norm_values: bool = False  # an RMS norm of each value head, without weights (Gemma 4)


def row_pieces(rows: int, width: int, threads: int) -> Iterator[slice]:
    """Yield slices of rows that torch's threads divide between rows, never within one.

    torch divides the elements of a slice evenly among its threads. For example 5 rows of 32,768
    elements with 2 threads -> slice(0, 4), slice(4, 5).
    """
    start = 0
    while start < rows:
        # A row with more than TORCH_GRAIN elements goes alone: it is always divided the same way.
        size = rows - start if width <= TORCH_GRAIN else 1
        while size > 1 and size % min(threads, -(-size * width // TORCH_GRAIN)):
            size -= 1
        yield slice(start, start + size)
        start += size


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Computed in fp32, and rounded once to x's dtype. weight_D: fp32. For example x [3, 4] (weight 1,
    eps 0) -> [0.8485, 1.1314].
    """
    return F.rms_norm(x_TD.float(), weight_D.shape, weight_D, eps).to(x_TD.dtype)


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual). Kernels may overwrite the arguments."""
    total_TD = x_TD + residual_TD
    return rms_norm(total_TD, weight_D, eps), total_TD


def rotary(x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Apply a rotary embedding to the pairs (i, i + d/2) of each head, in fp32.

    cos_Td, sin_Td: fp32 [T, 1, d]; sin is negated in the first half. For example x [1, 0], angle 90
    degrees -> [0, 1]. Source: RoFormer (Su et al. 2021), in GPT-NeoX's half layout.
    """
    first, second = x_THd.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return (x_THd * cos_Td).add_(swapped.mul_(sin_Td))


def act_mul(gate_up_MI: Tensor, activation: Activation, threads: int) -> Tensor:
    """Return act(gate) * (up + up_shift) of [gate | up], or act(up); see `Activation`.

    For example [1, 2], SwiGLU -> [1 / (1 + e^-1) * 2] = [1.4621].
    """
    if activation.parts == 1:
        return relu2(gate_up_MI)
    gate, up = gate_up_MI.chunk(2, dim=-1)
    width = gate.shape[1]
    if extra := -width % LANES:
        # Padding keeps torch's scalar tail off all columns. Otherwise bits would depend on how
        # columns are sharded.
        gate = F.pad(gate, (0, extra))
    if threads == 1 or gate.numel() <= TORCH_GRAIN:
        return _gated(gate, up, activation).contiguous()
    out = torch.empty_like(up)
    for rows in row_pieces(gate.shape[0], gate.shape[1], threads):
        for start in range(0, width, TORCH_GRAIN):
            columns = slice(start, start + TORCH_GRAIN)
            out[rows, columns] = _gated(gate[rows, columns], up[rows, columns], activation)
    return out


def relu2(x_MI: Tensor) -> Tensor:
    """Return max(x, 0) ** 2, computed in fp32 and rounded once to x's dtype: [-3, 2] -> [0, 4]."""
    return x_MI.float().relu().square().to(x_MI.dtype)


def _gated(gate: Tensor, up: Tensor, rule: Activation) -> Tensor:
    """Return act(gate) * up. Columns of gate beyond those of up are padding.

    SwiGLU rounds twice, the others once. GELU's factor 0.5 (1 + tanh(u)) is sigmoid(2u), with
    u = sqrt(2 / pi) (x + 0.044715 x^3).
    """
    width = up.shape[1]
    if rule.plain:
        return F.silu(gate)[:, :width].mul_(up)
    if rule.capped:
        return _capped(gate, up, rule)
    x = gate.float().clamp(max=rule.gate_limit)
    y = up.float().clamp(-rule.limit, rule.limit)
    # For GELU, factor * x is 2u.
    factor = rule.alpha if rule.kind == "silu" else 0.0713548162726 * x * x + 1.5957691216057
    x = (x * torch.sigmoid(factor * x))[:, :width].clamp(max=rule.act_limit)
    return (x * (y + rule.up_shift)).to(up.dtype)


def _capped(gate: Tensor, up: Tensor, rule: Activation) -> Tensor:
    """Return cap(gate) * sigmoid(gate) * cap(up), padded as in `_gated`."""
    width = up.shape[1]
    x = gate.float().contiguous()
    y = F.pad(up.float(), (0, gate.shape[1] - width)).contiguous()
    x = torch.tanh(x / rule.gate_cap) * rule.gate_cap * torch.sigmoid(x)
    y = torch.tanh(y / rule.up_cap) * rule.up_cap
    return (x * y)[:, :width].to(up.dtype)


def sigmoid_gate(logits_TL: Tensor, threads: int) -> Tensor:
    """Return the sigmoid of the first of LANES columns, fp32 [T, 1].

    The other columns are padding, because torch computes a single column with scalar code.
    """
    return _sigmoid(logits_TL.float(), threads)[:, :1]


def _sigmoid(x_TL: Tensor, threads: int) -> Tensor:
    """Return the sigmoid of rows whose width is a multiple of LANES."""
    out = torch.empty_like(x_TL)
    for rows in row_pieces(x_TL.shape[0], x_TL.shape[1], threads):
        torch.sigmoid(x_TL[rows], out=out[rows])
    return out


def sigmoid(x_TN: Tensor) -> Tensor:
    """Return the sigmoid of fp32 rows, batch-invariant."""
    return _whole_rows(torch.sigmoid, x_TN)


def softplus(x_TN: Tensor) -> Tensor:
    """Return log(1 + e^x) of fp32 rows, batch-invariant; above 20 it is x, as in torch."""
    return _whole_rows(F.softplus, x_TN)


def silu(x_TN: Tensor) -> Tensor:
    """Return x * sigmoid(x) of fp32 rows, batch-invariant."""
    return _whole_rows(F.silu, x_TN)


def gelu(x_TN: Tensor) -> Tensor:
    """Return GELU(x), with the error function, of fp32 rows, batch-invariant."""
    return _whole_rows(F.gelu, x_TN)


def exp(x: Tensor) -> Tensor:
    """Return e^x of fp32 elements. An element's bits do not depend on the number of elements."""
    lanes = F.pad(x.flatten(), (0, -x.numel() % LANES)).view(-1, LANES)
    return _whole_rows(torch.exp, lanes).flatten()[: x.numel()].view(x.shape)


def _whole_rows(function: Callable[[Tensor], Tensor], x_TN: Tensor) -> Tensor:
    """Apply an elementwise function such that a row's bits do not depend on the number of rows."""
    width = x_TN.shape[1]
    padded = F.pad(x_TN, (0, -width % LANES))
    out = [
        function(padded[rows])
        for rows in row_pieces(len(padded), padded.shape[1], torch.get_num_threads())
    ]
    return torch.cat(out)[:, :width] if out else x_TN


def sigmoid_mul(x_TN: Tensor, gates_TM: Tensor, threads: int) -> Tensor:
    """Return x * sigmoid(gates), computed in fp32 and rounded once to x's dtype.

    Each of M gates applies to N / M adjacent elements: x [1, 2, 3, 4], gates [0, 100] -> [0.5, 1,
    3, 4].
    """
    rows, num_gates = gates_TM.shape
    wide = F.pad(gates_TM.float(), (0, -num_gates % LANES))  # keeps the scalar tail off all columns
    gates = torch.empty_like(wide)
    for part in row_pieces(rows, wide.shape[1], threads):
        torch.sigmoid(wide[part], out=gates[part])
    return (x_TN.view(rows, num_gates, -1) * gates[:, :num_gates, None]).flatten(1).to(x_TN.dtype)


def soft_cap(logits_SV: Tensor, cap: float, threads: int) -> Tensor:
    """Return cap * tanh(logits / cap), fp32 (Gemma 2). With cap 30: 30 -> 22.8, 300 -> 30."""
    rows, width = logits_SV.shape
    wide = F.pad(logits_SV / cap, (0, -width % LANES))  # keeps the scalar tail off all columns
    for part in row_pieces(rows, wide.shape[1], threads):
        wide[part].tanh_()
    return wide[:, :width] * cap


def plain_sigmoid_gate(logits_TL: Tensor) -> Tensor:
    """Return the sigmoid of the first column, fp32 [T, 1], on GPUs and in compiled code.

    These have no scalar tail.
    """
    return logits_TL[:, :1].float().sigmoid()


def embedding(ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the rows `ids_T` of the embedding table."""
    return weight_VD.index_select(0, ids_T)


def write_kv(
    k_TGd: Tensor, v_TGv: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor
) -> None:
    """Write new keys and values to their slots (block * block_size + offset) of a layer's cache."""
    for x_TGd, cache in ((k_TGd, k_cache), (v_TGv, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(
            0, slot_mapping_T, to_entries(x_TGd, cache.dtype)
        )


def qk_norm_rope_cache(
    qkv_TN: Tensor,
    rule: HeadRule,
    rope_cache: RopeCacheInputs,
    cache: LayerCache,
    normed_THd: Tensor | None = None,
) -> Tensor:
    """Apply norms, clipping and rope to heads, and write keys and values to the KV cache.

    Returns scaled queries [T, H, d]. All steps are fp32, with one rounding at the end.

    qkv_TN: [T, (H + G) * d + G * v], queries first, values last.
    cache: of keys, and of values.
    normed_THd: fp32 [T, H + G, d], contiguous: already normed queries and keys, which replace those
        of qkv_TN.
    """
    cos_T1d, sin_T1d, slot_mapping_T = rope_cache
    k_cache, v_cache = cache
    heads = rule.num_heads
    num_qk_heads = rule.num_heads + rule.num_kv_heads
    dim = cos_T1d.shape[2]
    num_tokens = len(slot_mapping_T)  # without padding
    qk_THd = (
        qkv_TN[:, : num_qk_heads * dim].view(-1, num_qk_heads, dim).float()
        if normed_THd is None
        else normed_THd
    )
    v_TGv = qkv_TN[:num_tokens, num_qk_heads * dim :].view(
        num_tokens, rule.num_kv_heads, rule.v_dim or dim
    )
    if rule.norms is not None and not rule.norm_last:
        qk_THd = torch.rms_norm(qk_THd, (dim,), None, rule.eps) * rule.norms
    if rule.norm_values:
        v_TGv = torch.rms_norm(v_TGv.float(), v_TGv.shape[2:], None, rule.eps)
    if rule.clip < math.inf:
        qk_THd = qk_THd.clamp(-rule.clip, rule.clip)
        v_TGv = v_TGv.float().clamp(-rule.clip, rule.clip)
    rotated_THd = rotary(qk_THd, cos_T1d, sin_T1d)
    if rule.norms is not None and rule.norm_last:
        rotated_THd = torch.rms_norm(rotated_THd, (dim,), None, rule.eps).mul_(rule.norms)
    # Queries are scaled while they are fp32: one rounding instead of two.
    rotated_THd[:, :heads] *= rule.scale
    write_kv(rotated_THd[:num_tokens, heads:], v_TGv, k_cache, v_cache, slot_mapping_T)
    return rotated_THd[:, :heads].to(qkv_TN.dtype)


def route(
    logits_TE: Tensor,
    top_k: int,
    rule: RouterRule,
    bias_E: Tensor | None = None,
    expert_scale_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts for each token: (ids int32 [T, K], weights fp32 [T, K]), best first.

    bias_E: fp32, added to scores for the choice. expert_scale_E: fp32, factors of the weights.
    Scores, group scores and sums are fp32; of equal scores the lowest id is chosen. For example
    logits [0, ln 3, 0], top_k 2, softmax -> ids [1, 0], weights [0.6, 0.2].
    """
    logits_TE = logits_TE.float()
    if rule.score == "sparsemixer":
        ids_TK, weights_TK = _sparsemixer(logits_TE, top_k, rule.jitter)
    else:
        scores_TE = _scores(logits_TE, rule.score)
        keys_TE = _keys(scores_TE if bias_E is None else scores_TE + bias_E)
        if rule.kept_groups < rule.groups:
            keys_TE = _keep_groups(keys_TE, rule)
        ids_TK = keys_TE.topk(top_k, dim=-1).indices
        weights_TK = scores_TE.gather(-1, ids_TK)
        if rule.score == "softmax_selected":
            weights_TK = weights_TK.softmax(-1)
        elif rule.score == "sigmoid_selected":
            weights_TK = sigmoid(weights_TK)
    weights_TK = _scaled(weights_TK, rule)
    if expert_scale_E is not None:
        weights_TK = weights_TK * expert_scale_E[ids_TK]
    return ids_TK.int(), weights_TK


def weights_of(logits_TE: Tensor, ids_TK: Tensor, rule: RouterRule) -> Tensor:
    """Return the weights of experts that are chosen already, fp32 [T, K].

    ids_TK: int64. For example logits [0, ln 3, 0], experts [1, 0], softmax -> [0.6, 0.2].
    """
    return _scaled(_scores(logits_TE.float(), rule.score).gather(-1, ids_TK), rule)


def _scaled(weights_TK: Tensor, rule: RouterRule) -> Tensor:
    """Return weights after the normalization and the factor of a rule."""
    if rule.renormalize:
        total_T1 = weights_TK[:, :1].clone()
        for k in range(1, weights_TK.shape[1]):  # a fixed order, unlike that of torch's sums
            total_T1 += weights_TK[:, k : k + 1]
        weights_TK = weights_TK / (total_T1 + rule.epsilon).clamp(min=rule.floor)
    return weights_TK if rule.scale == 1 else weights_TK * rule.scale


def _scores(logits_TE: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits_TE.softmax(-1)
    if score == "sigmoid":
        experts = logits_TE.shape[1]
        return _sigmoid(F.pad(logits_TE, (0, -experts % LANES)), torch.get_num_threads())[
            :, :experts
        ]
    if score == "sqrt_softplus":
        return softplus(logits_TE).sqrt()
    return logits_TE


def _keys(scores_TE: Tensor) -> Tensor:
    """Return unique integers in the order of (score, -id).

    The bits of floats are ordered like integers, after those of negative floats are flipped.
    """
    bits = (scores_TE + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 16
    return keys - torch.arange(scores_TE.shape[-1], device=scores_TE.device)


def _keep_groups(keys_TE: Tensor, rule: RouterRule) -> Tensor:
    """Return the keys, with LOWEST for the experts of all but the best groups."""
    keys_TGS = keys_TE.view(len(keys_TE), rule.groups, keys_TE.shape[1] // rule.groups)
    # Undo `_keys`: add more than any id, and drop the 16 bits that ids occupy.
    bits = ((keys_TGS.topk(rule.num_group_scores, dim=-1).values + 0xFFFF) >> 16).int()
    scores_TGn = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
    kept = _keys(scores_TGn.sum(-1)).topk(rule.kept_groups, dim=-1).indices
    is_out = torch.ones_like(keys_TGS[..., 0], dtype=torch.bool).scatter_(-1, kept, False)
    return keys_TGS.masked_fill(is_out[..., None], LOWEST).flatten(1)


def _sparsemixer(logits_TE: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Return (ids, weights) of Phi-3.5-MoE's router.

    Experts are chosen one after the other. The weight of a choice is a softmax over the remaining
    experts whose logits are near the largest.
    """
    remaining_TE = logits_TE.clone()
    keys_TE = _keys(logits_TE)
    ids = []
    weights = []
    for _ in range(top_k):
        id_T1 = keys_TE.argmax(-1, keepdim=True)
        peak_T1 = logits_TE.gather(-1, id_T1)
        far_TE = (peak_T1 - logits_TE) / torch.maximum(logits_TE.abs(), peak_T1) > 2 * jitter
        weights.append(remaining_TE.masked_fill(far_TE, -math.inf).softmax(-1).gather(-1, id_T1))
        ids.append(id_T1)
        remaining_TE.scatter_(-1, id_T1, -math.inf)
        keys_TE.scatter_(-1, id_T1, LOWEST)
    return torch.cat(ids, -1), torch.cat(weights, -1)
