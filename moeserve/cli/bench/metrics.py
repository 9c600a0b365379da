"""Turns the outcomes of a load into the numbers that `vllm bench serve` writes, under its JSON keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moeserve.cli.bench.load import Outcome
from moeserve.errors import ConfigError

DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Returns limits in milliseconds by metric: ["ttft:200"] -> {"ttft": 200.0}. Raises ConfigError."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput takes pairs such as ttft:200 (milliseconds), got {pair!r}") from None
        if name not in ("ttft", "tpot", "e2el") or not limits[name] >= 0:
            raise ConfigError(f"--goodput knows ttft, tpot and e2el with a limit >= 0, got {pair!r}")
    return limits


def summarize(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Returns all result keys, details included. TPOT is vLLM's: (latency - TTFT) / (tokens - 1) of a request."""
    good = [o for o in outcomes if o.success]
    output_lens = [o.output_tokens if o.success else 0 for o in outcomes]
    total_in, total_out = sum(o.prompt_len for o in good), sum(output_lens)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / duration_s,
        "request_goodput": _num_within(good, goodput_ms) / duration_s if goodput_ms else None,
        "output_throughput": total_out / duration_s,
        "total_token_throughput": (total_in + total_out) / duration_s,
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": output_lens,
        "ttfts": [o.ttft_s for o in outcomes],
        "itls": [o.itl_s for o in outcomes],
        "start_times": [o.start_s for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }
    seconds: dict[str, list[float]] = {
        "ttft": [o.ttft_s for o in good],
        "tpot": [_tpot_s(o) for o in good if o.output_tokens > 1],
        "itl": [gap for o in good for gap in o.itl_s],
        "e2el": [o.latency_s for o in good],
    }
    for name in metrics:
        values_ms = np.asarray(seconds[name] or [0.0]) * 1e3
        result[f"mean_{name}_ms"] = float(values_ms.mean())
        result[f"median_{name}_ms"] = float(np.median(values_ms))
        result[f"std_{name}_ms"] = float(values_ms.std())
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = float(np.percentile(values_ms, p))
    return result


def _tpot_s(outcome: Outcome) -> float:
    if outcome.output_tokens < 2:
        return 0.0
    return (outcome.latency_s - outcome.ttft_s) / (outcome.output_tokens - 1)


def _num_within(good: Sequence[Outcome], limits_ms: Mapping[str, float]) -> int:
    times_s = [{"ttft": o.ttft_s, "tpot": _tpot_s(o), "e2el": o.latency_s} for o in good]
    return sum(all(1e3 * found[name] <= limit for name, limit in limits_ms.items()) for found in times_s)


def table(result: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """Returns the result as text in the layout of `vllm bench serve`."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Maximum request concurrency", result.get("max_concurrency")),
        ("Benchmark duration (s)", result["duration"]),
        ("Total input tokens", result["total_input_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
        ("Request goodput (req/s)", result["request_goodput"]),
        ("Output token throughput (tok/s)", result["output_throughput"]),
        ("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    lines = [" Serving Benchmark Result ".center(52, "=")]
    lines += [_row(label, value) for label, value in rows if value is not None]
    for name in metrics:
        lines.append(f" {METRICS[name]} ".center(52, "-"))
        for key, value in result.items():
            if key.endswith(f"_{name}_ms"):
                kind = key.removesuffix(f"_{name}_ms").capitalize()
                lines.append(_row(f"{kind} {name.upper()} (ms)", value))
    return "\n".join([*lines, "=" * 52])


def _row(label: str, value: Any) -> str:
    return f"{label + ':':<40} {value:.2f}" if isinstance(value, float) else f"{label + ':':<40} {value}"
