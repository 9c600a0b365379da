"""The targets of kernels and engines on a card, beside what was measured. Needs no torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.gpu.process import read_json

COPY_TB_S = {"h200": 4.3, "h100": 3.0}  # bytes read and written, if not measured
MATMUL_TFLOP_S = 790.0
SHAPE = "E128 N768 K2048 top-8"
PUBLISHED = Path(__file__).with_name("published_moe.json")
# Qwen3-30B-A3B on an H200: (batch, tokens/s).
DECODE = ((1, 380.0), (64, 3_100.0), (256, 9_000.0))
COMPARE: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Row:
    """One target."""

    figure: str
    relation: str
    must: float
    measured: float | None  # None if it was not measured
    note: str = ""  # a circumstance that differs from the target's

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else COMPARE[self.relation](self.measured, self.must)


def rows(results: Mapping[str, Any], card: str) -> list[Row]:
    """Return all targets beside the results.

    `results` has the sections' records by name; any may be missing or incomplete. `card` is the
    name of the card's folder.
    """
    peaks = {one["name"]: one for one in (results.get("environment") or {}).get("ceilings", ())}
    copy_tb_s = peaks.get("copy", {}).get("tb_s") or COPY_TB_S.get(card, COPY_TB_S["h200"])
    matmul = peaks.get("matmul", {}).get("tflop_s") or MATMUL_TFLOP_S
    found = [
        *_moe(results.get("moe") or {}, card),
        *_attention(results.get("attention") or {}, copy_tb_s),
    ]
    found += _qwen3(results, card)
    for name in ("qwen3", "gpt_oss", "v2_lite", "qwen3_fp8", "qwen3_int4"):
        found += _beside_floor(name, results.get(f"engine_{name}") or {}, copy_tb_s, matmul)
    return [*found, *_correct(results)]


def _moe(found: Mapping[str, Any], card: str) -> list[Row]:
    cases = [case for case in found.get("cases", ()) if case["shape"] == SHAPE]
    even = {
        case["tokens"]: case["figures"]["moeserve"] for case in cases if case["routing"] == "even"
    }
    fp8 = {case["tokens"]: case for case in found.get("w8a8", ())}
    note = "" if card == "h200" else "an H200's target"
    table = [
        Row("fused MoE M 64, TB/s of weights", ">=", 3.6, even.get(64, {}).get("tb_s"), note),
        Row("fused MoE M 4096, TFLOP/s", ">=", 400.0, even.get(4096, {}).get("tflop_s")),
        Row("fused MoE fp8 M 4096, TFLOP/s", ">=", 470.0, fp8.get(4096, {}).get("tflop_s")),
    ]
    ratios: dict[str, list[float]] = {"vllm": [], "sglang": []}
    for case in cases:
        for name, ratio in case["ratios"].items():
            ratios.setdefault(name, []).append(ratio)
    ratios["vllm 0.24, published"] = published_ratios(cases, card)
    for peer, values in ratios.items():
        table.append(
            Row(f"fused MoE, time of {peer} over ours, geomean", ">=", 1.15, geomean(values))
        )
        table.append(
            Row(
                f"fused MoE, time of {peer} over ours, least", ">=", 0.95, min(values, default=None)
            )
        )
    return table


def published_ratios(cases: Iterable[Mapping[str, Any]], card: str) -> list[float]:
    """Return published times over ours on the same card.

    They are those of a whole layer with balanced routing.
    """
    known = read_json(PUBLISHED)["cards"].get(card, {}).get(SHAPE, {}).get("bfloat16", {})
    ours = {
        str(c["tokens"]): c["figures"]["moeserve layer"]["us"]
        for c in cases
        if c["routing"] == "balanced"
    }
    return [known[tokens] / us for tokens, us in ours.items() if us and tokens in known]


def geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _attention(found: Mapping[str, Any], copy_tb_s: float) -> list[Row]:
    by_name = {
        case["contexts"]: case["fast"].get("tb_s")
        for key in ("decode", "latent")
        for case in found.get(key, ())
    }

    def share(name: str) -> float | None:
        return 100 * by_name[name] / copy_tb_s if by_name.get(name) else None

    skewed = by_name.get("1 x 128k + 31 x 4k")
    shown = f"{copy_tb_s:.2f} TB/s"
    return [
        Row(f"decode attention 64 x 8k, % of {shown}", ">=", 80.0, share("64 x 8k")),
        Row(
            f"latent decode attention 64 x 8k, 16 heads, % of {shown}",
            ">=",
            80.0,
            share("64 x 8k, 16 heads"),
        ),
        Row(
            "decode attention 1 x 128k + 31 x 4k, times its floor",
            "<=",
            1.3,
            copy_tb_s / skewed if skewed else None,
        ),
    ]


def _decodes(found: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return {case["batch"]: case for case in found.get("decode", ())}


def _qwen3(results: Mapping[str, Any], card: str) -> list[Row]:
    fast, batch = (results.get(f"engine_{name}") or {} for name in ("qwen3", "qwen3_batch"))
    decodes = _decodes(fast)
    table = []
    where = "" if card == "h200" else "an H200's target"
    for size, must in DECODE:
        case = decodes.get(size, {})
        note = where + (f", context {case['context']}" if case.get("context", 1024) < 1024 else "")
        table.append(
            Row(f"Qwen3-30B decode {size}, tok/s", ">=", must, case.get("tokens_per_s"), note)
        )
    rate = next((one["tokens_per_s"] for one in fast.get("prefill", ())), None)
    idle, whole = (decodes.get(64, {}).get(key) for key in ("idle_share", "tokens_per_s"))
    exact = _decodes(batch).get(64, {}).get("tokens_per_s")
    cost = 100 * (1 - exact / whole) if exact and whole else None
    return [
        *table,
        Row("Qwen3-30B prefill 4k, tok/s", ">=", 60_000.0, rate, where),
        Row("idle between steps at batch 64, %", "<=", 1.5, None if idle is None else 100 * idle),
        Row("cost of --determinism batch at batch 64, %", "<=", 10.0, cost),
        Row(
            "start of a 30B engine to its first token, s",
            "<=",
            20.0,
            fast.get("start_to_first_token_s"),
        ),
    ]


def _beside_floor(
    name: str, found: Mapping[str, Any], copy_tb_s: float, matmul: float
) -> list[Row]:
    """Compare tokens/s with the floor.

    For decode, the floor is reading each weight and cache entry once; for prefill, the products.
    """
    table = []
    for batch, case in _decodes(found).items():
        floor = batch * copy_tb_s * 1e12 / case["step_bytes"] if "step_bytes" in case else None
        table.append(
            Row(
                f"{name} decode {batch}, of its floor",
                ">=",
                0.5,
                case["tokens_per_s"] / floor if floor else None,
            )
        )
    table += [
        Row(f"{name} prefill, of its floor", ">=", 0.5, one["tflop_s"] / matmul)
        for one in found.get("prefill", ())
    ]
    return table or [Row(f"{name}, of its floor", ">=", 0.5, None)]


def _correct(results: Mapping[str, Any]) -> list[Row]:
    same = (results.get("ranks") or {}).get("same_tokens", {})
    ways = {way["way"]: way for way in (results.get("ranks") or {}).get("ways", ())}
    overlap = ways.get("two ranks, two micro-batches", {}).get("overlap")
    families = (results.get("families") or {}).get("families", ())
    alike = 100 * sum(one["same"] for one in families) / len(families) if families else None
    tests = (results.get("tests") or {}).get("failures")
    return [
        Row(
            "two ranks on one card, ways with one rank's tokens",
            ">=",
            2.0,
            float(sum(same.values())) if same else None,
        ),
        Row(
            "their exchange, hidden by two micro-batches, %",
            ">=",
            50.0,
            None if overlap is None else 100 * overlap,
        ),
        Row("families with the CPU's tokens, %", ">=", 100.0, alike),
        Row("tests that failed", "<=", 0.0, None if tests is None else float(tests)),
    ]


def as_json(table: list[Row]) -> list[dict[str, Any]]:
    return [{**asdict(row), "met": row.met} for row in table]


def as_text(table: list[Row]) -> str:
    words = {True: "met", False: "MISSED", None: "not measured"}
    wide = max(len(row.figure) for row in table)
    return "\n".join(
        f"{row.figure:<{wide}}  {row.relation} {row.must:<8g} "
        f"{'-' if row.measured is None else f'{row.measured:.4g}':<8} {words[row.met]}"
        f"{f' ({note})' if (note := row.note.strip(', ')) else ''}"
        for row in table
    )
