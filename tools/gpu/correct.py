"""Check every kernel on the card against its reference in fp32 or fp64, and batch invariance.

An error is |found - reference| / |reference| over all elements. bf16 rounds to 2^-9, so sums of
bf16 products stay below 1e-2. Kernels that only move or count must be exact. Invariance: a row
alone must have the same bits as in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.activation import act_mul
from moeserve.kernels.align import align, combine
from moeserve.kernels.attention_plan import Bounds
from moeserve.kernels.configs import facts_of
from moeserve.kernels.fp8 import E4M3, quantize
from moeserve.kernels.grouped_fp8 import Scaled, gate_up_fp8, launch_fp8_of
from moeserve.kernels.grouped_gemm import launch_of
from moeserve.kernels.grouped_weight_only import (
    Narrow,
    down_narrow,
    gate_up_narrow,
    launch_narrow_of,
)
from moeserve.kernels.inputs import StepArrays, StepWords, fill_step, pack, write
from moeserve.kernels.linear import linear
from moeserve.kernels.logprobs import logprobs
from moeserve.kernels.paged_attention import AttentionShape, attention, plan_attention
from moeserve.kernels.penalties import PenaltyRows, new_counts, penalise
from moeserve.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from moeserve.kernels.route import route
from moeserve.kernels.rows import add_rms_norm, embedding, rms_norm
from moeserve.kernels.sampling import SamplingTensors, sample
from moeserve.ops import elementwise
from moeserve.ops.inputs import RopeCacheInputs
from moeserve.ops.rules import SWIGLU, RouterRule
from tools.gpu import moe
from tools.gpu import quantized as narrow
from tools.gpu.attention import KV_HEADS, step_of
from tools.gpu.bench import Bench, error_of
from tools.gpu.references import (
    act_mul_reference,
    align_reference,
    attention_reference,
    combine_reference,
    embedding_reference,
    gate_up_reference,
    linear_reference,
    logprobs_reference,
    quantize_reference,
    rms_norm_reference,
    step_reference,
    widen,
    widen_narrow,
    widen_weights,
    write_reference,
)

ROUNDED = 4e-3
PRODUCT = 1e-2
EXACT = 0.0
Check = Callable[[Bench], tuple[Tensor, Tensor, float]]  # returns (found, reference, bound)


def size(bench: Bench, real: int, small: int) -> int:
    return small if bench.smoke else real


def norms(bench: Bench) -> tuple[Tensor, Tensor, float]:
    x = bench.random(size(bench, 300, 3), size(bench, 2048, 70))
    weight = torch.rand(x.shape[1], device=bench.device)
    return rms_norm(x, weight, 1e-6), rms_norm_reference(x.double(), weight.double(), 1e-6), ROUNDED


def added_norms(bench: Bench) -> tuple[Tensor, Tensor, float]:
    x, residual = (bench.random(size(bench, 300, 3), size(bench, 2048, 70)) for _ in range(2))
    weight = torch.rand(x.shape[1], device=bench.device)
    total = x + residual
    wanted = rms_norm_reference(total.double(), weight.double(), 1e-6)
    return (
        torch.cat(add_rms_norm(x, residual, weight, 1e-6)),
        torch.cat((wanted, total.double())),
        ROUNDED,
    )


def activation(bench: Bench) -> tuple[Tensor, Tensor, float]:
    x = bench.random(size(bench, 300, 3), size(bench, 1536, 70))
    return act_mul(x, SWIGLU), act_mul_reference(x.float()), ROUNDED


def embedded(bench: Bench) -> tuple[Tensor, Tensor, float]:
    table = bench.random(100, size(bench, 2048, 70))
    ids = torch.randint(0, 100, (size(bench, 300, 3),), device=bench.device)
    return embedding(ids, table), embedding_reference(ids, table), EXACT


def dense(bench: Bench) -> tuple[Tensor, Tensor, float]:
    inner = size(bench, 2048, 70)
    x = bench.random(size(bench, 300, 3), inner)
    w = bench.random(size(bench, 5120, 40), inner)
    bias = bench.random(w.shape[0])
    return linear(x, w, bias), linear_reference(x.double(), w.double(), bias.double()), ROUNDED


def routed(bench: Bench) -> tuple[Tensor, Tensor, float]:
    logits = bench.random(size(bench, 300, 3), size(bench, 128, 16), dtype=torch.float32)
    rule = RouterRule(renormalize=True)
    ids, shares = route(logits, 2, rule)
    wanted_ids, wanted = elementwise.route(logits, 2, rule)
    return torch.cat((ids.float(), shares)), torch.cat((wanted_ids.float(), wanted)), 1e-6


def aligned(bench: Bench) -> tuple[Tensor, Tensor, float]:
    slots = size(bench, 128, 8)
    ids = torch.rand(size(bench, 2000, 9), slots, device=bench.device).topk(2).indices.int()
    found = align(ids, slots, 16)
    wanted = align_reference(ids, slots, 16)
    assert found.order_N is not None
    assert wanted.order_N is not None
    tiles = len(wanted.expert_Z)
    return (
        torch.cat(
            (
                found.order_N,
                found.counts_e,
                found.ends_e,
                found.expert_Z[:tiles],
                found.row_Z[:tiles],
            )
        ),
        torch.cat((wanted.order_N, wanted.counts_e, wanted.ends_e, wanted.expert_Z, wanted.row_Z)),
        EXACT,
    )


def combined(bench: Bench) -> tuple[Tensor, Tensor, float]:
    y = bench.random(size(bench, 300, 3), 8, size(bench, 2048, 70))
    shares = torch.rand(size(bench, 300, 3), 8)
    ids = torch.randint(-1, 9, shares.shape, dtype=torch.int32, device=bench.device)
    shares = shares.to(bench.device)
    return combine(y, shares, ids), combine_reference(y, shares, ids), EXACT


def moe_shape(bench: Bench) -> moe.Shape:
    return moe.Shape(4, 64, 64, 2) if bench.smoke else moe.Shape(128, 768, 2048, 8)


def experts(bench: Bench, tokens: int) -> tuple[Tensor, Tensor, float]:
    shape = moe_shape(bench)
    w = moe.weights_of(bench, shape)
    batch = moe.batch_of(bench, shape, size(bench, tokens, 3))
    pairs = batch.ids.numel()
    config = launch_of(
        pairs, shape.experts, shape.width, shape.dim, bench.dtype, facts_of(bench.device).name
    )
    return moe.whole(batch, w, config, shape), moe.reference(batch, w), PRODUCT


def experts_fp8(bench: Bench) -> tuple[Tensor, Tensor, float]:
    """Check gate and up with e4m3 results.

    Their 3 mantissa bits round by 1/16 at worst, and by about 2^-5.2 on average.
    """
    shape = moe_shape(bench)
    batch = moe.batch_of(bench, shape, 100)
    groups = shape.dim // 128
    values = torch.randn(shape.experts, 2 * shape.width, shape.dim, device=bench.device).to(E4M3)
    scales = torch.rand(shape.experts, 2 * shape.width // 128, groups, device=bench.device) / 64
    w13 = Scaled(values, scales)
    x = Scaled(*quantize(batch.x))
    config = launch_fp8_of(
        batch.ids.numel(), shape.experts, shape.width, shape.dim, facts_of(bench.device).name
    )
    to = align(batch.ids, shape.experts, config["block_m"])
    found = gate_up_fp8(x, w13, to, config, shape.top_k)
    expected = gate_up_reference(widen(x.values, x.scales), widen_weights(w13), to, shape.top_k)
    return widen(found.values, found.scales), expected, 4e-2


def experts_int4(bench: Bench) -> tuple[Tensor, Tensor, float]:
    shape = moe_shape(bench)
    group = size(bench, 128, 32)
    batch = moe.batch_of(bench, shape, size(bench, 100, 3))

    def packed(outputs: int, inputs: int) -> Narrow:
        values = torch.randint(
            0, 256, (shape.experts, outputs, inputs // 2), dtype=torch.uint8, device=bench.device
        )
        return Narrow(
            group, values, bench.random(shape.experts, inputs // group, outputs, scale=0.01)
        )

    w13 = packed(2 * shape.width, shape.dim)
    w2 = packed(shape.dim, shape.width)
    rows = batch.ids.numel()
    device = facts_of(bench.device).name
    config = launch_narrow_of(
        rows, shape.experts, shape.width, shape.dim, "int4", group, bench.dtype, device
    )
    to = align(batch.ids, shape.experts, config["block_m"])
    y = down_narrow(gate_up_narrow(batch.x, w13, to, config, shape.top_k), w2, to, config)
    found = combine(y.view(*batch.ids.shape, -1), batch.shares, batch.ids)
    return found, moe.reference(batch, moe.Weights(widen_narrow(w13), widen_narrow(w2))), PRODUCT


def quantized(bench: Bench) -> tuple[Tensor, Tensor, float]:
    x = bench.random(size(bench, 300, 3), size(bench, 2048, 256))
    return widen(*quantize(x)), widen(*quantize_reference(x)), 1e-3  # ties may round differently


def decoded(bench: Bench, invariant: bool) -> tuple[Tensor, Tensor, float]:
    step = step_of(
        bench, [600, 0, 63, *([] if bench.smoke else [5000, 40_000])], [1] * size(bench, 5, 3)
    )
    found = attention(step.q, step.k, step.v, step.plan(invariant))
    return found, attended(step), PRODUCT


def prefilled(bench: Bench, invariant: bool) -> tuple[Tensor, Tensor, float]:
    step = step_of(bench, [0, 100], [size(bench, 1000, 9), size(bench, 33, 3)])
    return attention(step.q, step.k, step.v, step.plan(invariant)), attended(step), PRODUCT


def attended(step: Any) -> Tensor:
    return attention_reference(
        step.q.float(), step.k, step.v, step.blocks, step.starts, step.offsets
    )


def latent(bench: Bench) -> tuple[Tensor, Tensor, float]:
    """Check latent attention: all heads share one entry per token; its start is the values."""
    rank = size(bench, 512, 16)
    rotated = size(bench, 64, 16)
    context = size(bench, 3000, 40)
    shape = AttentionShape(size(bench, 128, 2), 1, rank + rotated, rank, 16, bench.dtype)
    k = bench.random(context // 16 + 2, 16, 1, shape.dim)
    v = k[..., :rank]
    blocks = torch.arange(1, context // 16 + 2, dtype=torch.int32, device=bench.device)[None]
    new = size(bench, 100, 3)
    starts = torch.tensor([context - new], dtype=torch.int32, device=bench.device)
    offsets = torch.tensor([0, new], dtype=torch.int32, device=bench.device)
    q = bench.random(new, shape.heads, shape.dim) * shape.dim**-0.5
    found = attention(
        q, k, v, plan_attention(blocks, starts, offsets, shape, Bounds(1, new, new, context))
    )
    return found, attention_reference(q.float(), k, v, blocks, starts, offsets), PRODUCT


def rotated(bench: Bench) -> tuple[Tensor, Tensor, float]:
    """Check norm per head, rotation, and storing keys and values in their slots."""
    heads = size(bench, 32, 8)
    kv = KV_HEADS
    dim = size(bench, 128, 32)
    tokens = size(bench, 300, 3)
    qkv = bench.random(tokens, heads + 2 * kv, dim)
    norm = torch.rand(heads + kv, dim, device=bench.device)
    turns = torch.rand(tokens, 1, dim // 2, device=bench.device) * 6
    cos = torch.cat((turns.cos(), turns.cos()), -1)
    sin = torch.cat((-turns.sin(), turns.sin()), -1)
    k, v = (bench.random(tokens // 16 + 1, 16, kv, dim) for _ in range(2))
    slots = torch.randperm(tokens, device=bench.device)
    rule = elementwise.HeadRule(heads, kv, 0.5, 1e-6, norm)
    q = qk_norm_rope_cache(qkv.flatten(1), rule, RopeCacheInputs(cos, sin, slots), (k, v))
    qk = qkv[:, : heads + kv].double()
    qk = qk / (qk.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    qk = qk * cos + torch.roll(qk, dim // 2, -1) * sin
    got = [cache.flatten(0, 1)[slots] for cache in (k, v)]
    return (
        torch.cat((q, *got), 1),
        torch.cat((qk[:, :heads] * 0.5, qk[:, heads:], qkv[:, heads + kv :]), 1),
        ROUNDED,
    )


def logged(bench: Bench) -> tuple[Tensor, Tensor, float]:
    logits = bench.random(
        size(bench, 64, 2), size(bench, 151_936, 700), scale=3.0, dtype=torch.float32
    )
    chosen = torch.randint(0, logits.shape[1], (len(logits),), device=bench.device)
    found = logprobs(logits, chosen, 5)
    wanted = logprobs_reference(logits, chosen, 5)
    return found[1], wanted[1], 1e-5


def sampled(bench: Bench) -> tuple[Tensor, Tensor, float]:
    """Greedy rows take the first maximum; sampled rows with top_k=1 take the same token."""
    logits = bench.random(size(bench, 64, 2), size(bench, 151_936, 700), dtype=torch.float32)
    rows = len(logits)

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=bench.device)

    seeds = full(7, torch.int32)
    greedy = sample(
        logits,
        SamplingTensors(full(0), full(-torch.inf), full(5, torch.int32), full(1), seeds, seeds),
    )[0]
    alone = sample(
        logits,
        SamplingTensors(full(1), full(-torch.inf), full(1, torch.int32), full(1), seeds, seeds),
    )[0]
    return torch.cat((greedy, alone)), logits.argmax(-1).repeat(2), EXACT


def penalised(bench: Bench) -> tuple[Tensor, Tensor, float]:
    vocab = size(bench, 151_936, 300)
    longest = size(bench, 3000, 40)
    logits = bench.random(2, vocab, dtype=torch.float32)
    table = torch.randint(0, vocab, (2, longest), dtype=torch.int32, device=bench.device)

    def row(*values: float, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=bench.device)

    floats = (row(value, value, dtype=torch.float32) for value in (1.5, 0.5, 0.25))
    rows = PenaltyRows(row(0, 1), row(1, 0), row(longest, longest), row(0, longest), *floats)
    wanted = logits.double()
    for at, (slot, has_answer) in enumerate(((1, True), (0, False))):
        said = torch.bincount(table[slot], minlength=vocab)
        change = torch.where(wanted[at] > 0, wanted[at] / 1.5, wanted[at] * 1.5)
        wanted[at] = torch.where(said > 0, change - has_answer * (0.5 * said + 0.25), wanted[at])
    penalise(logits, table, rows, longest, new_counts(2, vocab, bench.device))
    return logits, wanted, 1e-5


def staged(bench: Bench) -> tuple[Tensor, Tensor, float]:
    offsets = np.sort(np.random.default_rng(0).choice(5000, 900, replace=False)).astype(np.int64)
    words, pieces = pack(offsets, np.arange(900, dtype=np.int32))
    on_device = torch.from_numpy(words).to(bench.device)
    found, wanted = (torch.zeros(5000, dtype=torch.int32, device=bench.device) for _ in range(2))
    write(found, on_device, pieces)
    write_reference(wanted, on_device, pieces)
    return found, wanted, EXACT


def filled(bench: Bench) -> tuple[Tensor, Tensor, float]:
    """Check the arrays of a step that are filled from the requests' tables."""
    table = torch.randint(0, 1000, (8, 200), dtype=torch.int32, device=bench.device)
    blocks = torch.randint(1, 99, (1, 8, 13), dtype=torch.int32, device=bench.device)
    slots, starts, offsets = (
        np.array(row, dtype=np.int32) for row in ([4, 2, 7], [0, 9, 100], [0, 17, 18, 58])
    )
    step = StepWords.of(slots, starts, offsets, np.array([17, 56, 57]))
    both = [StepArrays.empty(70, 5, 4, 1, 13, bench.device) for _ in range(2)]
    fill_step(table, blocks, 16, step, torch.from_numpy(step.words).to(bench.device), both[0])
    step_reference(table, blocks, 16, step, both[1])
    names = (
        "ids_T",
        "positions_T",
        "slot_mapping_GT",
        "blocks_GRB",
        "sample_N",
        "offsets_R1",
        "starts_R",
    )
    found, wanted = (
        torch.cat([getattr(one, name).flatten().long() for name in names]) for one in both
    )
    return found, wanted, EXACT


CHECKS: Mapping[str, Check] = {
    "rms_norm": norms, "add_rms_norm": added_norms, "act_mul": activation, "embedding": embedded,
    "linear": dense, "route": routed, "align": aligned, "combine": combined,
    "moe 1": partial(experts, tokens=1), "moe 100": partial(experts, tokens=100),
    "moe 4096": partial(experts, tokens=4096), "moe w8a8": experts_fp8, "moe int4": experts_int4,
    "quantize": quantized, "decode": partial(decoded, invariant=True),
    "decode fast": partial(decoded, invariant=False), "prefill": partial(prefilled, invariant=True),
    "prefill fast": partial(prefilled, invariant=False), "mla": latent, "qk norm": rotated,
    "logprobs": logged, "sample": sampled, "penalties": penalised, "staged": staged, "step": filled,
    **narrow.CHECKS,
}  # fmt: skip
UNFIT_FOR_SMOKE = (
    "moe w8a8",
    "quantize",
)  # the interpreter rounds to e4m3 wrongly and has no products of it


def row_sizes(bench: Bench) -> tuple[int, ...]:
    return (1, 3, 20) if bench.smoke else (1, 2, 17, 65, 513, 4097)


def linear_is_invariant(bench: Bench) -> bool:
    dim = size(bench, 2048, 64)
    x = bench.random(size(bench, 4097, 40), dim)
    w = bench.random(size(bench, 5120, 48), dim)
    return all_equal([linear(x[:n], w)[:1] for n in row_sizes(bench)])


def norm_is_invariant(bench: Bench) -> bool:
    x = bench.random(size(bench, 4097, 40), size(bench, 2048, 64))
    weight = torch.rand(x.shape[1], device=bench.device)
    return all_equal([rms_norm(x[:n], weight, 1e-6)[:1] for n in row_sizes(bench)])


def moe_is_invariant(bench: Bench) -> bool:
    shape = moe_shape(bench)
    sizes = row_sizes(bench)
    rows = []
    of_experts = moe.weights_of(bench, shape)
    batch = moe.batch_of(bench, shape, sizes[-1])
    for n in sizes:
        part = moe.Batch(batch.x[:n], batch.ids[:n].contiguous(), batch.shares[:n].contiguous())
        pairs = n * shape.top_k
        device = facts_of(bench.device).name
        config = launch_of(pairs, shape.experts, shape.width, shape.dim, bench.dtype, device)
        to = align(part.ids, shape.experts, config["block_m"])
        y = moe.products(part, of_experts, to, config, shape.top_k)
        rows.append(combine(y.view(*part.ids.shape, shape.dim), part.shares, part.ids)[:1])
    return all_equal(rows)


def attention_is_invariant(bench: Bench) -> bool:
    """Compare a token decoded alone, in a batch, and as the last of a prefill."""
    context = size(bench, 1500, 530)
    step = step_of(bench, [context, *([] if bench.smoke else [7] * 60)], [1] * size(bench, 61, 1))
    batched = attention(step.q, step.k, step.v, step.plan(True))[:1]
    found = [batched]
    for new in (1, 20):
        start = torch.tensor([context + 1 - new], dtype=torch.int32, device=bench.device)
        offsets = torch.tensor([0, new], dtype=torch.int32, device=bench.device)
        plan = plan_attention(
            step.blocks[:1], start, offsets, step.shape, Bounds(1, new, new, context + 1)
        )
        q = torch.cat((bench.random(new - 1, *step.q.shape[1:]), step.q[:1]))
        found.append(attention(q, step.k, step.v, plan)[-1:])
    return all_equal(found)


def all_equal(rows: list[Tensor]) -> bool:
    return all(torch.equal(row, rows[0]) for row in rows[1:])


INVARIANT: Mapping[str, Callable[[Bench], bool]] = {
    "linear": linear_is_invariant, "rms_norm": norm_is_invariant, "moe": moe_is_invariant,
    "attention": attention_is_invariant,
    **{kind: partial(narrow.is_invariant, kind=kind) for kind in narrow.KINDS},
}  # fmt: skip


def run(bench: Bench) -> None:
    """Run all checks; `wrong` lists the names of those that fail.

    Products are not checked for invariance in a smoke run: the interpreter uses NumPy, whose bits
    depend on a row's place.
    """

    def check(name: str) -> dict[str, Any]:
        found, reference, bound = CHECKS[name](bench)
        error = error_of(found, reference)
        if not error <= bound:
            bench.found["wrong"].append(name)
        return {"name": name, "error": error, "bound": bound}

    def invariant(name: str) -> dict[str, Any]:
        same = INVARIANT[name](bench)
        if not same and not bench.smoke:
            bench.found["wrong"].append(f"bits of {name}")
        return {"name": name, "same": same}

    unfit = (
        *UNFIT_FOR_SMOKE,
        *narrow.UNFIT_FOR_SMOKE,
        *(f"{kind} {narrow.MANY}" for kind in narrow.KINDS),
    )
    fit = [
        name
        for name in CHECKS
        if not (bench.smoke and (name.startswith(unfit) or name.endswith(unfit)))
    ]
    bench.each("checks", fit, check)
    bench.each(
        "invariance", [name for name in INVARIANT if not (bench.smoke and name == "fp8")], invariant
    )
