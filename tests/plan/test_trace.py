"""Traces from files, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moeserve.errors import ConfigError
from moeserve.plan.trace import Arrival, RequestTrace, prompt_of, read_trace, synthetic


def write(path: Path, *lines: object) -> Path:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_mooncake(tmp_path: Path) -> None:
    lines = (
        {"timestamp": 3000, "input_length": 1000, "output_length": 7, "hash_ids": [5, 6]},
        {"timestamp": 1000, "input_length": 600, "output_length": 9, "hash_ids": [5, 8]},
    )
    trace = read_trace(write(tmp_path / "t.jsonl", *lines))
    assert trace.arrivals == [Arrival(0.0, 600, 9, (5, 8)), Arrival(2.0, 1000, 7, (5, 6))]
    assert [a.at_s for a in read_trace(tmp_path / "t.jsonl", 10.0).arrivals] == [0.0, 0.2]
    assert trace.shares_prefixes
    one, two = (np.frombuffer(prompt_of(i, a), "<i4") for i, a in enumerate(trace.arrivals))
    assert (len(one), len(two)) == (600, 1000)
    assert (one[:512] == two[:512]).all()
    assert one[512] != two[512]


def test_access_log_without_requests_that_generated_nothing(tmp_path: Path) -> None:
    chat = {
        "time": "2026-11-24T00:00:01.5Z",
        "route": "/v1/chat/completions",
        "prompt_tokens": 20,
        "completion_tokens": 3,
    }
    probe = {"time": "2026-11-24T00:00:00Z", "route": "/health", "status": 200}
    later = {**chat, "time": "2026-11-24T00:00:03.5Z"}
    trace = read_trace(write(tmp_path / "log", chat, probe, "", later))
    assert trace.arrivals == [Arrival(0.0, 20, 3), Arrival(2.0, 20, 3)]


def test_sharegpt_needs_times(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 80}]
    path = write(tmp_path / "s.json", [{"conversations": turns}, {"conversations": turns[:1]}])
    found = read_trace(path, 4.0).arrivals
    assert [(arrival.input, arrival.output) for arrival in found] == [(10, 20)]
    with pytest.raises(ConfigError, match="--rates"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "line 2"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"a": 1}', "line 2: expected Mooncake's .* got the keys a"),
        (
            '{"timestamp": 1, "input_length": -1, "output_length": 2}',
            "input_length must be .* got -1",
        ),
        ('{"timestamp": 1, "input_length": 1}', "output_length must be .* got None"),
        ('{"timestamp": 1, "input_length": 1e12, "output_length": 2}', "at most"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 2, "hash_ids": "x"}',
            "list of integers",
        ),
        (
            '{"time": 3, "route": "/", "prompt_tokens": 1, "completion_tokens": 1}',
            "is not like 2026",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, match: str) -> None:
    good = {"timestamp": 0, "input_length": 1, "output_length": 1}
    with pytest.raises(ConfigError, match=match):
        read_trace(write(tmp_path / "t", good, line))


def test_no_file_and_no_requests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="no request"):
        read_trace(write(tmp_path / "empty", ""))
    with pytest.raises(ConfigError, match="no requests"):
        RequestTrace([])


def test_synthetic_lengths_spread_around_the_mean() -> None:
    trace = synthetic([0.1 * i for i in range(500)], 100, 10, 0.5)
    assert all(
        50 <= arrival.input <= 150 and 5 <= arrival.output <= 15 for arrival in trace.arrivals
    )
    assert np.mean([arrival.input for arrival in trace.arrivals]) == pytest.approx(100, rel=0.05)
    assert trace == synthetic([0.1 * i for i in range(500)], 100, 10, 0.5)
    assert prompt_of(1, trace.arrivals[0])[:64] != prompt_of(2, trace.arrivals[0])[:64]
