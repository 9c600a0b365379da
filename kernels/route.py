"""Routing (top-k gating) for all model families: expert scores, the K best experts, their weights.

T tokens, E experts, K experts per token, G groups of S = E / G experts.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from moeserve.ops.rules import RouterRule

LOWEST = tl.constexpr(-(1 << 62))  # below the key of any score


@triton.jit
def _keys(scores, ids):
    """Return unique integers that are ordered like (score, -id).

    A float's bits are ordered like an integer if the bits of negative floats are flipped.
    """
    bits = (scores + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 16) - ids


@triton.jit
def _score_of(keys):
    bits = ((keys + 0xFFFF) >> 16).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scores(logits, inside, SCORE: tl.constexpr):
    if SCORE == "softmax":
        powers = tl.where(inside, tl.exp(logits - tl.max(tl.max(logits, 1), 0)), 0.0)
        return powers / tl.sum(tl.sum(powers, 1), 0)
    if SCORE == "sigmoid":
        return tl.sigmoid(logits)
    if SCORE == "sqrt_softplus":
        power = tl.exp(-tl.abs(logits))
        total = 1.0 + power
        # log(1 + power), also where the sum rounds
        rounds = tl.where(total == 1.0, 1.0, total - 1.0)
        rest = tl.where(total == 1.0, power, tl.log(total) * tl.div_rn(power, rounds))
        return tl.sqrt_rn(tl.maximum(logits, 0.0) + rest)
    return logits


@triton.jit
def _keep_groups(
    keys, num_groups, KEEP: tl.constexpr, GROUP_TOP: tl.constexpr, GROUPS: tl.constexpr
):
    """Keep the keys of the experts in the best groups, and set all others to LOWEST."""
    best = tl.max(keys, 1)
    scores = _score_of(best)
    if GROUP_TOP == 2:
        scores += _score_of(tl.max(tl.where(keys == best[:, None], LOWEST, keys), 1))
    groups = tl.arange(0, GROUPS)
    group_keys = tl.where(groups < num_groups, _keys(scores, groups), LOWEST)
    kept = groups < 0
    for _ in range(KEEP):
        chosen = group_keys == tl.max(group_keys, 0)
        kept = kept | chosen
        group_keys = tl.where(chosen, LOWEST, group_keys)
    return tl.where(kept[:, None], keys, LOWEST)


@triton.jit
def _weight(score, best_score, scores, keys, band, SCORE: tl.constexpr):
    """Return the weight of the next expert before normalization.

    best_score: that of the token's first expert.

    sparsemixer: the softmax of the score over the remaining experts that are not far below it.
    """
    weight = score
    if SCORE == "softmax_selected":
        weight = tl.exp(score - best_score)
    elif SCORE == "sigmoid_selected":
        weight = tl.sigmoid(score)
    elif SCORE == "sparsemixer":
        far = (score - scores) / tl.maximum(
            tl.abs(scores), score, propagate_nan=tl.PropagateNan.ALL
        ) > band
        powers = tl.where(far | (keys == LOWEST), 0.0, tl.exp(scores - score))
        weight = tl.div_rn(1.0, tl.sum(tl.sum(powers, 1), 0))
    return weight


@triton.jit
def _divided(weights_K, total, epsilon, floor, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr):
    """Divide the weights by their sum, if the rule says so."""
    if SCORE == "softmax_selected":
        weights_K = tl.div_rn(weights_K, total)
    elif RENORMALIZE:
        weights_K = tl.div_rn(
            weights_K, tl.maximum(total + epsilon, floor, propagate_nan=tl.PropagateNan.ALL)
        )
    return weights_K


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr, bias_ptr, expert_scale_ptr, num_tokens_ptr, ids_ptr, weights_ptr, num_tokens,
    row_stride, num_groups, group_size, epsilon, floor, scale, band,
    K: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, KEEP: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """One program routes one token.

    num_tokens_ptr: None, or the number of tokens on the device, which replaces num_tokens.
    GROUPS x SIZE: padded shape of all experts. CHOICES: K, padded. KEEP: number of groups to keep,
    0 for all. band: relative distance of "far" in sparsemixer.
    """
    token = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, CHOICES)
    ids_K = tl.full((CHOICES,), -1, tl.int32)
    weights_K = tl.zeros((CHOICES,), tl.float32)
    if num_tokens_ptr is not None:
        num_tokens = tl.load(num_tokens_ptr)
    if token < num_tokens:
        group = tl.arange(0, GROUPS)[:, None]
        place = tl.arange(0, SIZE)[None, :]
        experts = group * group_size + place
        inside = (group < num_groups) & (place < group_size)
        logits = tl.load(
            logits_ptr + token * row_stride + experts, mask=inside, other=-float("inf")
        ).to(tl.float32)
        scores = _scores(logits, inside, SCORE)
        selection_scores = scores
        if bias_ptr is not None:
            selection_scores += tl.load(bias_ptr + experts, mask=inside, other=0.0)
        keys = tl.where(inside, _keys(selection_scores, experts), LOWEST)
        if KEEP > 0:
            keys = _keep_groups(keys, num_groups, KEEP, GROUP_TOP, GROUPS)
        best_score = _score_of(tl.max(tl.max(keys, 1), 0))
        total = 0.0
        for k in range(K):
            best = tl.max(tl.max(keys, 1), 0)
            chosen = keys == best
            weight = _score_of(best)
            if bias_ptr is not None:
                weight = tl.sum(tl.sum(tl.where(chosen, scores, 0.0), 1), 0)
            weight = _weight(weight, best_score, scores, keys, band, SCORE)
            total += weight
            ids_K = tl.where(choices == k, (-best & 0xFFFF).to(tl.int32), ids_K)
            weights_K = tl.where(choices == k, weight, weights_K)
            keys = tl.where(chosen, LOWEST, keys)
        weights_K = _divided(weights_K, total, epsilon, floor, SCORE, RENORMALIZE) * scale
        if expert_scale_ptr is not None:
            weights_K *= tl.load(expert_scale_ptr + ids_K, mask=choices < K, other=0.0)
    tl.store(ids_ptr + token * K + choices, ids_K, mask=choices < K)
    tl.store(weights_ptr + token * K + choices, weights_K, mask=choices < K)


def route(
    logits_TE: Tensor,
    top_k: int,
    rule: "RouterRule",
    bias_E: Tensor | None = None,
    expert_scale_E: Tensor | None = None,
    num_tokens: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the top-k experts of each token, best first: (ids int32 [T, K], weights fp32 [T, K]).

    Scores are fp32. Ties go to the lowest expert id. Weights are summed in the order 0, 1, ... K-1.

    bias_E: fp32, added to the scores for the selection only.
    expert_scale_E: fp32, multiplied to the weights of each expert.
    num_tokens: rows from here on are padding: their ids are -1, their weights 0, and their logits
        are not read. A number, or int32 [1] on the device, which CUDA graphs read at each replay.

    Example: logits [0, ln 3, 0], top_k 2, softmax -> ids [1, 0], weights [0.6, 0.2]
    """
    tokens, experts = logits_TE.shape
    groups = rule.groups
    size = experts // groups
    assert experts % groups == 0, (experts, groups)
    assert rule.kept_groups == groups or size >= rule.num_group_scores, (experts, rule)
    assert 1 <= top_k <= min(rule.kept_groups * size, 32), (top_k, rule, size)
    assert experts <= 1024, experts
    assert logits_TE.stride(1) == 1, logits_TE.stride()
    for part in (bias_E, expert_scale_E):
        assert part is None or (part.dtype, part.shape) == (torch.float32, (experts,)), (
            part.dtype,
            part.shape,
        )
    ids_TK = torch.empty((tokens, top_k), dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty((tokens, top_k), dtype=torch.float32, device=logits_TE.device)
    keep = rule.kept_groups if rule.kept_groups < groups else 0
    if rule.score == "sparsemixer":  # supports neither bias nor groups
        bias_E = None
        keep = 0
    device_num_tokens = num_tokens if isinstance(num_tokens, Tensor) else None
    limit = num_tokens if isinstance(num_tokens, int) else tokens
    if tokens:
        route_kernel[(tokens,)](
            logits_TE, bias_E, expert_scale_E, device_num_tokens, ids_TK, weights_TK, limit,
            logits_TE.stride(0), groups, size, rule.epsilon, rule.floor, rule.scale,
            2 * rule.jitter, K=top_k, SCORE=rule.score,
            RENORMALIZE=rule.renormalize, KEEP=keep,
            GROUP_TOP=rule.num_group_scores, GROUPS=triton.next_power_of_2(groups),
            SIZE=triton.next_power_of_2(size),
            CHOICES=triton.next_power_of_2(top_k),
            num_warps=max(1, triton.next_power_of_2(experts) // 256),
        )  # fmt: skip
    return ids_TK, weights_TK
