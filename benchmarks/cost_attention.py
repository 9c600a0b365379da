"""Predictions of kernels/cost.py for attention, beside measured times; part of benchmarks.cost.

The attention kernel loops over tiles of positions, and its programs take work items from a list
(kernels/attention_plan.py). This module counts the items of a step, the tiles of each item, and the
bytes that come from DRAM. Most of the measured kernels are FlashAttention-3, which overlaps
exponentials with products; SGLang's for heads of 512 are Triton's.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from moeserve.kernels import configs, cost, paged_attention, tuning
from moeserve.kernels.attention_plan import SPLIT, SPLIT_TILES
from moeserve.kernels.cost import CARDS, Card, Facts
from moeserve.kernels.paged_attention import AttentionShape
from moeserve.plan.tables import PACKAGE

Kernel = tuple[int, int]  # (query rows of a program, stages)
FACTS = configs.cache_folder("kernel-facts")


class Step(NamedTuple):
    """A batch of `rows` requests with `new` new tokens each, which end at position `context`."""

    rows: int
    new: int
    context: int


def shape(heads: int, kv_heads: int, dim: int, v_dim: int = 0) -> AttentionShape:
    """Return a shape in bf16 with blocks of 16 positions."""
    return AttentionShape(heads, kv_heads, dim, v_dim or dim, 16, torch.bfloat16)


COMPILED = {
    (s.dim, s.v_dim): s
    for s in (shape(32, 4, 128), shape(64, 8, 64), shape(16, 2, 512), shape(16, 1, 576, 512))
}
USUAL = tuple(
    shape(*heads) for heads in ((32, 4, 128), (32, 8, 128), (64, 8, 128), (8, 1, 128), (64, 8, 64))
)
WIDE = tuple(shape(*heads) for heads in ((16, 2, 512), (8, 1, 512), (4, 1, 512)))
LATENT = tuple(shape(heads, 1, 576, 512) for heads in (128, 64, 16))
FA3 = ("kernel_source", "=", "vllm_flash_attn_fa3")
TRITON = ("kernel_source", "=", "triton")
TABLES = {  # title -> table, filter of its rows, shapes
    "decode, FlashAttention-3": ("attention/vllm/*/generation_attention", [FA3], USUAL),
    "prefill, FlashAttention-3": ("attention/vllm/*/context_attention", [FA3], USUAL),
    "decode, Triton (SGLang)": ("attention/sglang/*/generation_attention", [TRITON], WIDE),
    "prefill, Triton (SGLang)": ("attention/sglang/*/context_attention", [TRITON], WIDE),
    "decode of latents, FlashAttention-3": ("mla/sglang/*/generation_mla", [], LATENT),
}
DECODE = [
    Step(rows, 1, context) for rows in (1, 8, 64, 256) for context in (512, 2048, 8192, 32_768)
]
PREFILL = [Step(rows, new, new) for rows in (1, 8) for new in (512, 1024, 2048, 4096, 8192)]


@cache
def facts_of(dim: int, v_dim: int) -> Mapping[Kernel, Facts]:
    """Return facts about the kernels for heads of these widths, cached in FACTS.

    They do not depend on the number of heads.
    """
    file = FACTS / f"attention-{dim}-{v_dim}-triton-{triton.__version__}.pickle"
    if not file.exists():
        FACTS.mkdir(parents=True, exist_ok=True)
        found: dict[Kernel, Facts] = {}
        with ProcessPoolExecutor(2, get_context("spawn"), cost.compile_only) as pool:
            for facts in pool.map(
                partial(compile_kernels, COMPILED[dim, v_dim]), tuning.ATTENTION["num_stages"]
            ):
                found |= facts
        file.write_bytes(pickle.dumps(found))
    known: Mapping[Kernel, Facts] = pickle.loads(file.read_bytes())
    return known


def compile_kernels(of: AttentionShape, stages: int) -> dict[Kernel, Facts]:
    """Return facts about the kernels of all sizes, in a process that called `cost.compile_only`."""
    found: dict[Kernel, Facts] = {}
    for job in tuning.attention_jobs(of, torch.device("meta")):
        try:
            attend, _ = cost.compiled_by(
                partial(job.run, {**job.default, "num_stages": stages}), 2
            )  # the other merges
        except tuning.CANNOT_RUN:
            continue
        found[job.size, stages] = attend
    return found


def seconds(
    facts: Facts,
    of: AttentionShape,
    step: Step,
    block_m: int,
    config: Mapping[str, int],
    card: Card,
) -> float:
    """Return the predicted time of one layer's attention; infinity if it cannot run."""
    resident = min(cost.occupancy(facts), config["programs"])
    if not resident:
        return math.inf
    rows, new, context = step
    positions = paged_attention.tile_positions(of, block_m)
    tile = block_m // of.group
    # Positions that each tile of queries sees.
    ends = context - new + np.minimum(tile * np.arange(1, -(-new // tile) + 1), new)
    cut = len(ends) <= SPLIT_TILES and context > SPLIT
    splits = -(-context // SPLIT) if cut else 1
    items = rows * of.groups * len(ends) * splits
    steps = np.ceil(ends / positions)
    mean = float(steps.mean()) / splits
    longest = SPLIT / positions if cut else float(steps.max())
    position = (of.dim + (0 if of.latent else of.v_dim)) * 2
    loaded = positions * position / cost.L2_BYTES_PER_CYCLE
    wait = cost.LOAD_LATENCY_CYCLES / max(1, config["num_stages"] // 2)
    each = items / card.multiprocessors
    beside = min(resident, math.ceil(each))
    cycles = max(
        cost.wave_cycles(facts, 1, longest, loaded, wait),
        # The longest items come first, so that programs finish at about the same time.
        cost.wave_cycles(facts, beside, mean, loaded, wait) * each / beside,
    )
    sums = rows * new * of.heads * splits * (of.v_dim + 2) * 4.0 if cut else 0.0
    num_bytes = (
        rows * (of.kv_heads * context * position + new * of.heads * (of.dim + of.v_dim) * 2.0)
        + sums
    )
    took_s = cost.launch_s(cycles, num_bytes, card)
    return took_s + cost.launch_s(cost.PROLOGUE_CYCLES, sums, card) if cut else took_s


def predicted(of: AttentionShape, step: Step, block_m: int, card: Card) -> dict[int, float]:
    """Return predicted seconds by number of stages, the default number first."""
    default = paged_attention.launch_of(of, of.dtype, block_m, "")
    facts = facts_of(of.dim, of.v_dim)
    return {
        stages: seconds(
            facts[block_m, stages], of, step, block_m, {**default, "num_stages": stages}, card
        )
        for stages in dict.fromkeys((default["num_stages"], *tuning.ATTENTION["num_stages"]))
        if (block_m, stages) in facts
    }


def measured(
    folder: Path, device: str, table: str, rows: list[Any], of: AttentionShape
) -> dict[Step, float]:
    """Return the seconds of one shape in the newest version of a table."""
    from pyarrow import parquet

    [*_, newest] = sorted(folder.glob(f"{device}_sxm/{table}_perf.parquet"))
    wanted = [*rows, ("num_heads", "=", of.heads), ("kv_cache_dtype", "=", "bfloat16")]
    if not of.latent:
        wanted += [
            ("num_key_value_heads", "=", of.kv_heads),
            ("head_dim", "=", of.dim),
            ("window_size", "=", 0),
        ]
    found: dict[Step, float] = {}
    names = ("batch_size", "isl", "step", "latency")
    columns = parquet.read_table(newest, columns=list(names), filters=wanted).to_pydict()
    for batch, new, step, took_ms in zip(*(columns[name] for name in names), strict=True):
        key = Step(batch, new, new + step)
        found[key] = min(found.get(key, math.inf), took_ms / 1e3)
    return found


def beside_tables(source: str, device: str) -> dict[str, Any]:
    """Return predicted over measured time for each table of TABLES.

    Predicted is the default configuration of the kernels that need not be batch-invariant. `source`
    is that of `read_tables`.
    """
    package = find_spec("aiconfigurator_core") if source == PACKAGE else None
    places = package.submodule_search_locations if package else None
    folder = Path(places[0], "systems/data") if places else Path(source)
    card = CARDS[next(name for name in CARDS if device.upper() in name)]
    found: dict[str, Any] = {}
    for title, (table, rows, shapes) in TABLES.items():
        decode = title.startswith("decode")
        ratios = {}
        pairs = []
        for of in shapes:
            times = measured(folder, device, table, rows, of)
            steps = [step for step in (DECODE if decode else PREFILL) if step in times]
            size = paged_attention.tile_rows(of, invariant=False)[0 if decode else -1]
            mine = [
                (next(iter(predicted(of, step, size, card).values())), times[step])
                for step in steps
            ]
            name = f"H{of.heads} KV{of.kv_heads} D{of.dim}"
            ratios[name] = {
                f"{step.rows} x {step.context}": round(p / m, 3)
                for step, (p, m) in zip(steps, mine, strict=True)
            }
            pairs += mine
        found[title] = {"predicted_over_measured": ratios, **agreement(pairs)}
    return found


def spearman(a: Any, b: Any) -> float:
    """Return the rank correlation."""
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


def agreement(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the rank correlation and the errors of (predicted, measured) pairs."""
    predicted, measured = np.array(pairs).T
    errors = np.abs(np.log(predicted / measured))
    return {
        "entries": len(pairs),
        "rank_correlation_of_all": round(spearman(predicted, measured), 3),
        "median_ratio": round(float(np.median(predicted / measured)), 3),
        "median_error_percent": round(100 * float(np.expm1(np.median(errors))), 1),
        "p90_error_percent": round(100 * float(np.expm1(np.quantile(errors, 0.9))), 1),
    }


def gains() -> dict[str, Any]:
    """Return the predicted gain of the best kernel over the default, by card and kernel.

    The steps are those that `moeserve tune` times.
    """
    found: dict[str, Any] = {}
    for device, card in CARDS.items():
        of_card = found.setdefault(device, {})
        for (dim, v_dim), of in COMPILED.items():
            for size in sorted({kernel[0] for kernel in facts_of(dim, v_dim)}):
                for step in (Step(64, 1, 4096), Step(1, 2048, 4096)):
                    times = predicted(of, step, size, card)
                    best = min(times, key=times.__getitem__)
                    gain = next(iter(times.values())) / times[best]
                    of_card[f"D{dim} of {size} rows, {step.rows} x {step.new}"] = {
                        "gain": round(gain, 3),
                        "stages": best,
                    }
    return found
