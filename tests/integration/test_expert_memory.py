"""A server with a part of the experts in memory: the same answers, and counted reads."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.conftest import Server, running_server

CONFIG = "model:\n  expert_memory: 4MiB\n  packed_cache: {}\n"


def test_same_tokens_and_counters(server: Server, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    found = []
    config.write_text(CONFIG.format(tmp_path / "packed"))
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "logprobs": 3}
    expected = server.post("/v1/completions", body)[1]["choices"]
    assert "expert_cache" not in server.get("/metrics")[1]
    with running_server(
        tmp_path / "log", "--max-model-len", "1024", "--config", str(config)
    ) as small:
        for _ in range(2):
            assert small.post("/v1/completions", body)[1]["choices"] == expected
            numbers = re.findall(
                r"^moeserve:expert_cache_(\w+)_total{.*} (\S+)$",
                small.get("/metrics")[1],
                re.MULTILINE,
            )
            found.append({name: float(number) for name, number in numbers})
    first, second = found
    assert first.keys() == {"hits", "misses", "stall_seconds", "read_bytes"}
    assert all(0 < first[name] < second[name] for name in first)
