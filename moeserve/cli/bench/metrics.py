"""Computes the metrics of a benchmark, with the definitions and JSON keys of `vllm bench serve`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moeserve.cli.bench.load import Outcome

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def summarize(
    outcomes: Sequence[Outcome],
    duration_s: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Return the metrics of all requests. The TPOT of a request is vLLM's: (latency - TTFT) /
    (tokens - 1).
    """
    good = [o for o in outcomes if o.success]
    total_in = sum(o.prompt_len for o in good)
    total_out = sum(o.output_tokens for o in good)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / duration_s,
        "output_throughput": total_out / duration_s,
        "total_token_throughput": (total_in + total_out) / duration_s,
    }
    seconds: dict[str, list[float]] = {
        "ttft": [o.ttft_s for o in good],
        "tpot": [
            (o.latency_s - o.ttft_s) / (o.output_tokens - 1) for o in good if o.output_tokens > 1
        ],
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


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return each request's lengths, times in seconds, text and error."""
    return {
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_tokens if o.success else 0 for o in outcomes],
        "ttfts": [o.ttft_s for o in outcomes],
        "itls": [o.itl_s for o in outcomes],
        "start_times": [o.start_s for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def table(result: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """Format the result like `vllm bench serve`."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Maximum request concurrency", result.get("max_concurrency")),
        ("Benchmark duration (s)", result["duration"]),
        ("Total input tokens", result["total_input_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
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
    return (
        f"{label + ':':<40} {value:.2f}"
        if isinstance(value, float)
        else f"{label + ':':<40} {value}"
    )
