"""The numbers of a load, checked by hand."""

from __future__ import annotations

import pytest

from moeserve.cli.bench.load import Outcome
from moeserve.cli.bench.metrics import METRICS, format_table, request_details, summarize

A = Outcome(
    10, True, 3, started_at_s=100.0, ttft_s=0.1, latency_s=0.5, itl_s=[0.1, 0.3], text="abc"
)
B = Outcome(20, True, 1, started_at_s=100.2, ttft_s=0.3, latency_s=0.3, text="x")
C = Outcome(30, False, 5, started_at_s=100.4, error="Overloaded: full")
D = Outcome(5, True, 2, started_at_s=101.0, ttft_s=0.2, latency_s=0.25, itl_s=[0.05], text="de")


def test_every_number_by_hand() -> None:
    got = summarize([A, B, C, D], 2.0, metrics=list(METRICS), percentiles=[50, 99.9])
    assert (got["completed"], got["failed"]) == (3, 1)
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (35, 6)
    assert got["request_throughput"] == 1.5
    assert got["output_throughput"] == 3.0
    assert got["total_token_throughput"] == 20.5
    each = request_details([A, B, C, D])
    assert each["output_lens"] == [3, 1, 0, 2]
    assert each["errors"] == ["", "", "Overloaded: full", ""]
    assert got["mean_ttft_ms"] == pytest.approx(200)
    assert got["median_ttft_ms"] == pytest.approx(200)
    assert got["std_ttft_ms"] == pytest.approx(81.65, abs=0.01)
    assert got["mean_tpot_ms"] == pytest.approx(
        (200 + 50) / 2
    )  # (0.5-0.1)/2 and 0.05/1; one token has none
    assert got["mean_itl_ms"] == pytest.approx(150)
    assert got["p50_itl_ms"] == pytest.approx(100)
    assert got["mean_e2el_ms"] == pytest.approx(350)
    assert "p99.9_e2el_ms" in got


def test_nothing_completed_is_zeros_not_a_crash() -> None:
    got = summarize([C], 1.0, metrics=list(METRICS), percentiles=[99])
    assert (got["completed"], got["failed"], got["p99_ttft_ms"]) == (0, 1, 0.0)
    assert "Failed requests" in format_table(got, list(METRICS))


def test_table_shows_what_was_asked() -> None:
    got = summarize([A, B], 2.0, metrics=["ttft"], percentiles=[99])
    text = format_table(got | {"max_concurrency": 4}, ["ttft"])
    assert "P99 TTFT (ms):" in text
    assert "Maximum request concurrency:             4" in text
    assert "TPOT" not in text
