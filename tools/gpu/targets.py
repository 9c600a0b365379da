"""What the kernels and the engine must reach on one H200, beside what was measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

COPY_TB_S = 4.3  # of an H200, bytes read and written
SHAPE = "E128 N768 K2048 top-8"
ENGINE = (
    ("decode 1, tok/s", "decode_1", "tokens_per_s", ">=", 380.0),
    ("decode 64, tok/s", "decode_64", "tokens_per_s", ">=", 3_100.0),
    ("decode 256, tok/s", "decode_256", "tokens_per_s", ">=", 9_000.0),
    ("prefill 4k, tok/s", "prefill", "tokens_per_s", ">=", 60_000.0),
    ("idle between steps at batch 256, %", "decode_256", "idle_share", "<=", 1.5),
)
COMPARE: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Row:
    """measured: None where it was not."""

    figure: str
    relation: str
    must: float
    measured: float | None

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else COMPARE[self.relation](self.measured, self.must)


def rows(results: Mapping[str, Any]) -> list[Row]:
    """results: of the sections by name; any of them may be missing or without figures."""
    return [*_moe(results.get("moe") or {}), *_attention(results.get("attention") or {}),
            *_engine(results.get("engine") or {}), *_ranks(results.get("ranks") or {})]  # fmt: skip


def _moe(found: Mapping[str, Any]) -> list[Row]:
    even = {
        case["tokens"]: case["figures"]["moeserve"]
        for case in found.get("cases", ())
        if case["shape"] == SHAPE and not case["skew"]
    }

    def of(tokens: int, rate: str) -> float | None:
        value: float | None = even.get(tokens, {}).get(rate)
        return value

    some = [rate for tokens in (64, 128, 256, 512) if (rate := of(tokens, "tb_s")) is not None]
    table = [
        Row("fused MoE M 64-512, least TB/s of weights", ">=", 3.6, min(some, default=None)),
        Row("fused MoE M 4096, TFLOP/s", ">=", 400.0, of(4096, "tflop_s")),
        Row("fused MoE M 16384, TFLOP/s", ">=", 470.0, of(16_384, "tflop_s")),
    ]
    ratios = found.get("ratio_geomeans", {})
    for peer in {"vllm": 0, "sglang": 0} | ratios:
        of_peer = ratios.get(peer, {})
        table.append(Row(f"fused MoE, time of {peer} over ours, geomean", ">=", 1.15, of_peer.get("geomean")))
        table.append(Row(f"fused MoE, time of {peer} over ours, least", ">=", 0.95, of_peer.get("worst")))
    return table


def _attention(found: Mapping[str, Any]) -> list[Row]:
    by_name = {case["contexts"]: case["fast"] for case in found.get("decode", ())}
    even, skewed = by_name.get("64 x 4k", {}), by_name.get("1 x 128k + 31 x 4k", {})
    share = 100 * even["tb_s"] / COPY_TB_S if even.get("tb_s") else None
    over = COPY_TB_S / skewed["tb_s"] if skewed.get("tb_s") else None
    return [
        Row(f"decode attention 64 x 4k, % of {COPY_TB_S} TB/s", ">=", 80.0, share),
        Row("decode attention 1 x 128k + 31 x 4k, times its floor", "<=", 1.3, over),
    ]


def _engine(found: Mapping[str, Any]) -> list[Row]:
    table = []
    for name, key, figure, relation, must in ENGINE:
        value = found.get(key, {}).get(figure)
        table.append(Row(name, relation, must, value if value is None or "%" not in name else 100 * value))
    table.append(Row("start to first token, s", "<=", 20.0, found.get("start_to_first_token_s")))
    return table


def _ranks(found: Mapping[str, Any]) -> list[Row]:
    same = [is_same for way, is_same in found.get("identical", {}).items() if way != "one rank"]
    return [Row("two ranks on one card, ways with one rank's tokens", ">=", 2.0, float(sum(same)) if same else None)]


def as_text(table: list[Row]) -> str:
    words = {True: "met", False: "MISSED", None: "-"}
    width = max(len(row.figure) for row in table)
    lines = [f"{'figure':<{width}}  {'must':>12}  {'measured':>12}"]
    for row in table:
        measured = "not measured" if row.measured is None else f"{row.measured:,.2f}"
        lines.append(f"{row.figure:<{width}}  {row.relation} {row.must:>9,.2f}  {measured:>12}  {words[row.met]}")
    return "\n".join(lines)


def as_json(table: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) | {"met": row.met} for row in table]
