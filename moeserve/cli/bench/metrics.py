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
    completed = [outcome for outcome in outcomes if outcome.success]
    num_input_tokens = sum(outcome.prompt_len for outcome in completed)
    num_output_tokens = sum(outcome.output_tokens for outcome in completed)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(outcomes) - len(completed),
        "total_input_tokens": num_input_tokens,
        "total_output_tokens": num_output_tokens,
        "request_throughput": len(completed) / duration_s,
        "output_throughput": num_output_tokens / duration_s,
        "total_token_throughput": (num_input_tokens + num_output_tokens) / duration_s,
    }
    seconds_by_metric: dict[str, list[float]] = {
        "ttft": [outcome.ttft_s for outcome in completed],
        "tpot": [
            (outcome.latency_s - outcome.ttft_s) / (outcome.output_tokens - 1)
            for outcome in completed
            if outcome.output_tokens > 1
        ],
        "itl": [gap for outcome in completed for gap in outcome.itl_s],
        "e2el": [outcome.latency_s for outcome in completed],
    }
    for name in metrics:
        values_ms = np.asarray(seconds_by_metric[name] or [0.0]) * 1e3
        result[f"mean_{name}_ms"] = float(values_ms.mean())
        result[f"median_{name}_ms"] = float(np.median(values_ms))
        result[f"std_{name}_ms"] = float(values_ms.std())
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = float(np.percentile(values_ms, p))
    return result


def request_details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return each request's lengths, times in seconds, text and error."""
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_tokens if outcome.success else 0 for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itl_s for outcome in outcomes],
        "start_times": [outcome.started_at_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def format_table(result: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """Return the result as text, like `vllm bench serve`."""
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
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {shown}"
