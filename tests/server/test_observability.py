"""The Grafana board and the alert rules: every metric and label in them is served."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from moeserve.cluster.link import Resized

FOLDER = Path(__file__).resolve().parents[2] / "docs/observability"
ASK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
VLLMS_BOARD = [  # all that its 12 panels read
    "e2e_request_latency_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "kv_cache_usage_perc",
    "num_requests_running",
    "time_to_first_token_seconds_bucket",
    "num_requests_waiting",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
]


def expressions() -> list[str]:
    board = json.loads((FOLDER / "grafana.json").read_text())
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found += [
        variable["definition"]
        for variable in board["templating"]["list"]
        if "definition" in variable
    ]
    return found + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


async def served(live) -> dict[str, set[str]]:
    """The labels of each sample's name after one request."""
    await live.post("/v1/chat/completions", ASK)
    async with live.session.get(live.url + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


async def test_the_board_and_the_rules_read_what_is_served(live):
    live.engine.outbox.put(
        Resized(msgspec.structs.replace(live.engine.ready(), num_moe_layers=2, num_experts=4))
    )
    async with asyncio.timeout(20):
        while live.front.ready.num_experts != 4:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    known = await served(live)
    used = expressions()
    assert len(used) > 30
    for expr in used:
        names = re.findall(r"moeserve:\w+", expr)
        assert names, expr
        labels = set(re.findall(r"[{,]\s*(\w+)=~?\"", expr)) | {
            label for group in re.findall(r"by \(([^)]*)\)", expr) for label in group.split(", ")
        }
        for name in names:
            assert name in known, (name, expr)
        assert labels - {"instance"} <= set.union(*(known[name] for name in names)), expr


async def test_vllms_own_board_has_data_in_every_panel(launch):
    async with launch(metrics_names="vllm") as live:
        known = await served(live)
    for name in VLLMS_BOARD:
        assert "model_name" in known[f"vllm:{name}"], name
    assert "finished_reason" in known["vllm:request_success_total"]


@pytest.mark.parametrize("name", ["moeserve.service", "Containerfile"])
def test_the_commands_in_these_files_exist(name):
    from moeserve.cli.main import build_parser

    known = set(build_parser("serve")._option_string_actions)
    lines = [
        line
        for line in (FOLDER / name).read_text().splitlines()
        if "moeserve serve" in line or "moeserve /" in line
    ]
    assert lines
    for line in lines:
        _, _, arguments = line.partition(
            "moeserve serve" if "moeserve serve" in line else " moeserve /"
        )
        assert set(re.findall(r"--[a-z-]+", arguments)) <= known
