"""From the outcomes of a load to the numbers that `vllm bench serve` writes, under its JSON keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    """["ttft:200", "tpot:20"] -> milliseconds by metric."""
    wanted: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            wanted[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput takes pairs such as ttft:200 (milliseconds), got {pair!r}") from None
        if name not in ("ttft", "tpot", "e2el") or not wanted[name] >= 0:
            raise ConfigError(f"--goodput knows ttft, tpot and e2el with a limit >= 0, got {pair!r}")
    return wanted


def summarize(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float],
) -> dict[str, Any]:
    """All result keys, details included. TPOT is (latency - TTFT) / (tokens - 1) per request, as vLLM defines it."""
    good = [o for o in outcomes if o.success]
    output_lens = [o.output_tokens if o.success else 0 for o in outcomes]
    total_in, total_out = sum(o.prompt_len for o in good), sum(output_lens)
    seconds: dict[str, list[float]] = {
        "ttft": [o.ttft_s for o in good],
        "tpot": [_tpot_s(o) for o in good if o.output_tokens > 1],
        "itl": [gap for o in good for gap in o.itl_s],
        "e2el": [o.latency_s for o in good],
    }
    peak_tokens, peak_requests = _peaks(good)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / duration_s,
        "request_goodput": _num_meeting(good, goodput_ms) / duration_s if goodput_ms else None,
        "output_throughput": total_out / duration_s,
        "total_token_throughput": (total_in + total_out) / duration_s,
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": output_lens,
        "ttfts": [o.ttft_s for o in outcomes],
        "itls": [o.itl_s for o in outcomes],
        "start_times": [o.start_s for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    for name in metrics:
        result |= _statistics(name, seconds[name], percentiles)
    return result


def _statistics(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values_ms = np.asarray(values_s or [0.0]) * 1e3
    found = {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
    }
    for p in percentiles:
        found[f"p{p:g}_{name}_ms"] = float(np.percentile(values_ms, p))
    return found


def _tpot_s(outcome: Outcome) -> float:
    if outcome.output_tokens < 2:
        return 0.0
    return (outcome.latency_s - outcome.ttft_s) / (outcome.output_tokens - 1)


def _num_meeting(good: Sequence[Outcome], goodput_ms: Mapping[str, float]) -> int:
    measure: dict[str, Callable[[Outcome], float]] = {
        "ttft": lambda o: o.ttft_s,
        "tpot": _tpot_s,
        "e2el": lambda o: o.latency_s,
    }
    return sum(all(1e3 * measure[name](o) <= limit for name, limit in goodput_ms.items()) for o in good)


def _peaks(good: Sequence[Outcome]) -> tuple[float, int]:
    """Most chunks within one second of the run, and most requests that ran at the same time."""
    if not good:
        return 0.0, 0
    begin_s = min(o.start_s for o in good)
    per_second: dict[int, int] = {}
    edges: list[tuple[float, int]] = []
    for o in good:
        edges += [(o.start_s, 1), (o.start_s + o.latency_s, -1)]
        at_s = o.start_s + o.ttft_s - begin_s
        for gap_s in (*o.itl_s, 0.0):
            per_second[math.floor(at_s)] = per_second.get(math.floor(at_s), 0) + 1
            at_s += gap_s
    running = most = 0
    for _, change in sorted(edges):  # an end comes before a start at the same moment
        running += change
        most = max(most, running)
    return float(max(per_second.values())), most


def table(result: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """The numbers for people."""
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
        ("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests", result["max_concurrent_requests"]),
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
