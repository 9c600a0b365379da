"""The results of a simulation: latency and throughput of clients, and totals of the engines."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
# Bins of a histogram of inter-token latencies, which are too many to keep: seconds, 1 % apart.
_EDGES = np.geomspace(1e-6, 1e4, 2303)
_EDGE_LIST = _EDGES.tolist()
QUANTILES = (50, 90, 99)


class Clients:
    """The times of all requests, by request id. Times are seconds, nan until they are known."""

    def __init__(self, at_s: F64) -> None:
        self.at_s = at_s  # arrival
        self.first_s = np.full(len(at_s), np.nan)  # first token
        self.last_s = np.full(len(at_s), np.nan)  # last token so far
        self.is_done = np.zeros(len(at_s), np.bool_)
        self.num_tokens = np.zeros(len(at_s), np.int64)
        self.gap_counts = np.zeros(len(_EDGES) + 1, np.int64)  # histogram of inter-token latencies

    def record_tokens(self, rids: NDArray[np.int64], now_s: float) -> None:
        """Record one more token of each of these requests."""
        previous_s = self.last_s[rids]
        is_first = np.isnan(previous_s)
        if is_first.any():
            self.first_s[rids[is_first]] = now_s
            previous_s = previous_s[~is_first]
        np.add.at(self.gap_counts, np.searchsorted(_EDGES, now_s - previous_s), 1)
        self.last_s[rids] = now_s
        self.num_tokens[rids] += 1

    def count_continued(self, number: int, gap_s: float) -> None:
        """Record one more token of `number` requests, `gap_s` after the previous one of each.

        This only counts the gaps: `last_s` and `num_tokens` are set when the requests end.
        """
        self.gap_counts[bisect_left(_EDGE_LIST, gap_s)] += number


@dataclass(slots=True)
class Steps:
    """Totals over the steps of all engines."""

    num_steps: int = 0
    num_empty: int = 0  # steps in which an engine had no tokens
    num_tokens: int = 0
    num_rows: int = 0
    num_preempted: int = 0
    max_waiting: int = 0  # maximum over time and engines
    min_free_share: float = 1.0  # minimum share of free KV blocks
    prompt_tokens: int = 0
    cached_tokens: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # number of requests by error code


def summarise(clients: Clients, steps: Steps, delay_s: float = 0.0) -> dict[str, Any]:
    """Return the metrics of a simulation, with the names of `moeserve bench serve`; times in ms.

    delay_s: from the engine to the client and back.
    """
    done = clients.is_done
    duration_s = float(np.nanmax(clients.last_s) - clients.at_s[0]) if done.any() else 0.0
    num_tokens = int(clients.num_tokens.sum())
    ttft_s = (clients.first_s - clients.at_s)[done] + delay_s
    e2e_s = (clients.last_s - clients.at_s)[done] + delay_s
    has_several = clients.num_tokens[done] > 1
    tpot_s = (clients.last_s - clients.first_s)[done][has_several] / (
        clients.num_tokens[done][has_several] - 1
    )
    result: dict[str, Any] = {
        "requests": len(done),
        "completed": int(done.sum()),
        "refused": sum(steps.refused.values()),
        "duration": duration_s,
        "request_throughput": done.sum() / duration_s if duration_s else 0.0,
        "output_throughput": num_tokens / duration_s if duration_s else 0.0,
        "steps": steps.num_steps,
        "empty_steps": steps.num_empty,
        "mean_rows": steps.num_rows / max(1, steps.num_steps - steps.num_empty),
        "preemptions": steps.num_preempted,
        "most_waiting": steps.max_waiting,
        "peak_kv_use": 1 - steps.min_free_share,
        "cached_share": steps.cached_tokens / max(1, steps.prompt_tokens),
    }
    for name, values_s in (("ttft", ttft_s), ("tpot", tpot_s), ("e2el", e2e_s)):
        for q in QUANTILES:
            result[f"p{q}_{name}_ms"] = (
                1e3 * float(np.percentile(values_s, q)) if len(values_s) else 0.0
            )
    cumulated = clients.gap_counts.cumsum()
    for q in QUANTILES:
        itl_s = 0.0
        if cumulated[-1]:
            bin_index = int(np.searchsorted(cumulated, q / 100 * cumulated[-1]))
            itl_s = float(_EDGES[min(bin_index, len(_EDGES) - 1)])
        result[f"p{q}_itl_ms"] = 1e3 * itl_s
    return {
        key: round(float(value), 3) if isinstance(value, float) else value
        for key, value in result.items()
    }


def format_metrics(result: dict[str, Any]) -> str:
    """Return the metrics as text."""
    lines = [
        f"{result['completed']:,} of {result['requests']:,} requests in"
        f" {result['duration']:,.1f} s: {result['request_throughput']:,.2f} requests/s,"
        f" {result['output_throughput']:,.0f} tokens/s",
        f"{'ms':<22}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    names = {
        "ttft": "to the first token",
        "itl": "between tokens",
        "tpot": "per token",
        "e2el": "to the last token",
    }
    for key, label in names.items():
        columns = [f"{result[f'p{q}_{key}_ms']:>10,.1f}" for q in QUANTILES]
        lines.append(f"{label:<22}{''.join(columns)}")
    lines.append(
        f"{result['steps']:,} steps of an engine, {result['mean_rows']:.1f} requests in each;"
        f" preemptions {result['preemptions']}; most waiting {result['most_waiting']};"
        f" KV blocks in use at most {100 * result['peak_kv_use']:.0f} %;"
        f" {100 * result['cached_share']:.0f} % of prompt tokens from the cache"
    )
    if result["refused"]:
        lines.append(f"{result['refused']} requests were refused: they can never fit")
    return "\n".join(lines)
