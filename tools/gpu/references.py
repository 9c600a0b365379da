"""References of the kernels' operations in plain PyTorch, for tests and for checks on a card.

Arguments and shapes are those of the kernels' wrappers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.align import Alignment
from moeserve.kernels.attention_plan import EVERYTHING
from moeserve.kernels.fp8 import BLOCK, E4M3, E4M3_MAX, LEAST_AMAX
from moeserve.kernels.grouped_fp8 import Scaled
from moeserve.kernels.grouped_weight_only import Narrow
from moeserve.kernels.inputs import StepArrays, StepWords
from moeserve.ops import elementwise
from moeserve.ops.quantized import E2M1
from moeserve.ops.rules import SWIGLU, Activation


def align_reference(ids_TK: Tensor, num_experts: int, block_m: int) -> Alignment:
    """Return the alignment without spare tiles and with the shortest possible order_N."""
    flat = ids_TK.flatten()
    order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    counts = flat[order].bincount(minlength=num_experts)
    ends = counts.cumsum(0)
    tiles = -(-counts // block_m)
    experts = torch.arange(num_experts, device=flat.device).repeat_interleave(tiles)
    within = torch.arange(len(experts), device=flat.device) - (tiles.cumsum(0) - tiles)[experts]
    rows = (ends - counts)[experts] + within * block_m
    return Alignment(block_m, order.int(), counts.int(), ends.int(), experts.int(), rows.int())


def gate_up_reference(x: Tensor, w13_eFD: Tensor, to: Alignment, top_k: int = 1) -> Tensor:
    """Compute it for existing rows, rounded once."""
    num_rows = int(to.counts_e.sum())
    found = []
    rows = x[:num_rows] if to.order_N is None else x[to.order_N[:num_rows] // top_k]
    for w13_FD, part in zip(w13_eFD, torch.split(rows, to.counts_e.tolist()), strict=True):
        gate, up = (part.double() @ w13_FD.double().T).chunk(2, dim=-1)
        found.append(gate * torch.sigmoid(gate) * up)
    return torch.cat(found).to(x.dtype)


def down_reference(h_NI: Tensor, w2_eDI: Tensor, to: Alignment) -> Tensor:
    """Compute it in the order of the sorted rows, rounded once."""
    parts = torch.split(h_NI[: int(to.counts_e.sum())], to.counts_e.tolist())
    found = [part.double() @ w2_DI.double().T for w2_DI, part in zip(w2_eDI, parts, strict=True)]
    return torch.cat(found).to(h_NI.dtype)


def quantize_reference(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    width = x_MK.shape[1]
    x_MGB = torch.unflatten(
        torch.nn.functional.pad(x_MK.float(), (0, -width % BLOCK)), 1, (-1, BLOCK)
    )
    odd_MGB = ~x_MGB.isfinite()
    scales_MG = (
        x_MGB.abs().masked_fill(odd_MGB, 0).amax(2).clamp(min=LEAST_AMAX.value) / E4M3_MAX.value
    )
    values_MGB = (x_MGB / scales_MG[:, :, None]).masked_fill(odd_MGB, torch.nan)
    return values_MGB.to(E4M3).flatten(1)[:, :width], scales_MG


def widen(values_MK: Tensor, scales_MG: Tensor) -> Tensor:
    """Multiply values by their scales, in fp64."""
    return (
        values_MK.double()
        * scales_MG.repeat_interleave(BLOCK, -1)[..., : values_MK.shape[-1]].double()
    )


def widen_narrow(w: Narrow) -> Tensor:
    """Return the weights [e, outputs, inputs] in fp64."""
    values = w.values.double()
    zeros = w.zeros
    inputs = w.shape[-1]
    if w.in_pairs:
        tiles = torch.unflatten(w.values, -1, (-1, w.half))
        values = torch.stack([tiles & 15, tiles >> 4], -2).flatten(-3).double()
        if w.floats:
            values = torch.tensor(E2M1, dtype=torch.float64, device=values.device)[values.long()]
        zeros = torch.full_like(w.scales, 8) if zeros is None and not w.floats else zeros
    parts = (w.scales, torch.zeros_like(w.scales) if zeros is None else zeros)
    scales, zeros = (
        part.double().transpose(-1, -2).repeat_interleave(w.group, -1)[..., :inputs]
        for part in parts
    )
    return (values - zeros) * scales


def combine_reference(y_TKD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Compute it with the kernel's bits."""
    is_there = (ids_TK >= 0)[:, :, None]
    terms_TKD = torch.where(is_there, y_TKD.float() * weights_TK[:, :, None], 0.0)
    total_TD, *rest = terms_TKD.unbind(1)
    for term_TD in rest:
        total_TD = total_TD + term_TD
    return total_TD.to(y_TKD.dtype)


def publish_reference(ids_TK: Tensor, most_tokens: int, num_local: int, num_ranks: int) -> Tensor:
    """Return the ids [R, M, K] that each rank receives.

    Its own experts count from 0; ids of other ranks' experts lie outside.
    """
    ids_MK = torch.nn.functional.pad(ids_TK, (0, 0, 0, most_tokens - len(ids_TK)), value=-1)
    first_R = torch.arange(num_ranks, dtype=torch.int32, device=ids_TK.device) * num_local
    return torch.where(ids_MK < 0, -1, ids_MK - first_R[:, None, None])


def gather_reference(x_RMW: Tensor, order_P: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the rows [P, W], and the place of each pair [R, M * K], -1 if elsewhere."""
    ranks, most_tokens, _ = x_RMW.shape
    places_N = order_P.new_full((ranks * most_tokens * top_k,), -1)
    places_N[order_P] = torch.arange(len(order_P), dtype=order_P.dtype, device=order_P.device)
    return x_RMW.flatten(0, 1)[order_P // top_k], places_N.view(ranks, -1)


def collect_reference(
    y_RPD: Tensor, places_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor, num_local: int
) -> Tensor:
    """Compute it with the kernel's bits."""
    known = (ids_TK >= 0) & (ids_TK < len(y_RPD) * num_local)
    ranks_TK, rows_TK = (
        torch.where(known, of_TK, 0).long() for of_TK in (ids_TK // num_local, places_TK)
    )
    return combine_reference(y_RPD[ranks_TK, rows_TK], weights_TK, torch.where(known, ids_TK, -1))


def attention_reference(
    q_THd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks_RN: Tensor,
    starts_R: Tensor,
    offsets_R1: Tensor,
    window: int = EVERYTHING,
    chunk: int = EVERYTHING,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute it in fp32, row by row."""
    out = q_THd.new_zeros((*q_THd.shape[:2], v_cache.shape[3]))
    group = q_THd.shape[1] // k_cache.shape[2]
    for row, start in enumerate(starts_R.tolist()):
        first, end = offsets_R1[row : row + 2].tolist()
        keys = torch.arange(start + end - first, device=q_THd.device)
        k, v = (
            c[blocks_RN[row].long()].flatten(0, 1)[: len(keys)].float() for c in (k_cache, v_cache)
        )
        scores = torch.einsum(
            "thd,lhd->htl", q_THd[first:end].float(), k.repeat_interleave(group, 1)
        )
        if soft_cap:
            scores = soft_cap * (scores / soft_cap).tanh()
        queries = keys[start:, None]
        hidden = (keys > queries) | (keys <= queries - window) | (keys < queries // chunk * chunk)
        scores.masked_fill_(hidden, -torch.inf)
        if sinks_H is not None:
            scores = torch.cat((scores, sinks_H[:, None, None].expand(-1, end - first, 1)), -1)
        probs = scores.softmax(-1)[:, :, : len(keys)]
        out[first:end] = torch.einsum("htl,lhd->thd", probs, v.repeat_interleave(group, 1)).to(
            out.dtype
        )
    return out.flatten(1)


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute it, rounded once."""
    x = x_TD.float()
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight_D).to(x_TD.dtype)


def embedding_reference(ids_T: Tensor, table_VD: Tensor, scale: float = 1.0) -> Tensor:
    """Compute it, rounded once."""
    return (table_VD.index_select(0, ids_T).float() * scale).to(table_VD.dtype)


def act_mul_reference(gate_up_MI: Tensor, activation: Activation = SWIGLU) -> Tensor:
    """Compute it, rounded once."""
    return elementwise.act_mul(gate_up_MI.float(), activation, 1).to(gate_up_MI.dtype)


def linear_reference(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute it, rounded once."""
    y = x_MK.double() @ w_NK.double().T
    return (y if bias_N is None else y + bias_N.double()).to(x_MK.dtype)


def logprobs_reference(
    logits_PV: Tensor, chosen_P: Tensor, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `logprobs` by sorting."""
    logprobs_PV = torch.log_softmax(logits_PV.float(), dim=-1)
    likeliest_Pn = logprobs_PV.sort(dim=-1, descending=True, stable=True).indices[:, :n]
    ids_PN = torch.cat([chosen_P.long().unsqueeze(1), likeliest_Pn], dim=1)
    rank_P = (logits_PV >= logits_PV.gather(1, ids_PN[:, :1])).sum(dim=-1)
    return ids_PN, logprobs_PV.gather(1, ids_PN), rank_P


def cut_reference(d_SV: Tensor, farthest_S: Tensor, top_k_S: Tensor, top_p_S: Tensor) -> Tensor:
    """Compute `cut` by sorting the distances d_SV; those beyond farthest_S do not count."""
    d_SV = d_SV.masked_fill(d_SV > farthest_S.unsqueeze(1), torch.inf).sort(dim=-1).values
    kth_S1 = d_SV.gather(1, (top_k_S.long().unsqueeze(1) - 1).clamp(max=d_SV.shape[1] - 1))
    weights_SV = torch.exp(-d_SV.double()).masked_fill(d_SV > kth_S1, 0.0)
    # Counts some of the tokens that are equally distant, but then the first of those is kept.
    before_SV = weights_SV.cumsum(-1) - weights_SV
    kept_SV = before_SV < top_p_S.double().unsqueeze(1) * weights_SV.sum(-1, keepdim=True)
    pth_S = d_SV.masked_fill(~(kept_SV | (top_p_S == 1).unsqueeze(1)), 0.0).amax(dim=-1)
    return torch.minimum(torch.minimum(kth_S1.squeeze(1), pth_S), farthest_S)


def step_reference(
    table: Tensor, blocks: Tensor, block_size: int, step: StepWords, out: StepArrays
) -> None:
    """Compute it row by row."""
    slots_R, starts_R, offsets_R1, sample_N = np.split(
        step.words, [step.rows, 2 * step.rows, 3 * step.rows + 1]
    )
    for array in (
        out.ids_T,
        out.positions_T,
        out.slot_mapping_GT,
        out.blocks_GRB,
        out.sample_N,
        out.starts_R,
    ):
        array.zero_()
    out.offsets_R1.fill_(step.tokens)
    for row, (slot, start) in enumerate(zip(slots_R.tolist(), starts_R.tolist(), strict=True)):
        mine = slice(int(offsets_R1[row]), int(offsets_R1[row + 1]))
        positions = torch.arange(start, start + mine.stop - mine.start, device=table.device)
        out.ids_T[mine] = table[slot, positions].to(out.ids_T.dtype)
        out.positions_T[mine] = positions
        out.slot_mapping_GT[:, mine] = (
            blocks[:, slot, positions // block_size].long() * block_size + positions % block_size
        )
        out.blocks_GRB[:, row] = blocks[:, slot, : out.blocks_GRB.shape[2]]
        out.starts_R[row] = start
        out.offsets_R1[row] = mine.start
    out.sample_N[: step.samples] = torch.from_numpy(sample_N)


def write_reference(arena: Tensor, words: Tensor, pieces: int) -> None:
    """Write one piece after the other."""
    values = words[2 * pieces + 1 :]
    starts = words[pieces : 2 * pieces + 1].tolist()
    for place, start, end in zip(words[:pieces].tolist(), starts, starts[1:], strict=False):
        arena[place : place + end - start] = values[start:end]


def widen_weights(w: Scaled) -> Tensor:
    """Return e4m3 weights with a scale per 128 x 128 block, in fp64."""
    return widen(w.values, w.scales.repeat_interleave(BLOCK, 1))
