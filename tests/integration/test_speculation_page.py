"""The five tokens of docs/speculation.md: as the example prints them, as the sampler draws them, as
often right.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.cli.main import build_parser
from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.plan import NewRequest
from moeserve.runner.sampling.noise import Gumbel
from moeserve.runner.sampling.reference import ReferenceSampler
from moeserve.runner.sampling.rows import row_keys
from moeserve.runner.tables import Tables, host_upload
from moeserve.sampling import TokenSampling
from moeserve.server.metrics import PREFIX
from moeserve.speculation import SpeculationSpec
from tests.integration.conftest import running_server

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/speculation.md").read_text()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples/speculation_by_hand.py"))


def test_the_page_has_what_the_example_prints(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    example["main"]()
    steps, answer, shares = capsys.readouterr().out.strip().split("\n\n")
    assert f"\n\n{steps}\n\n" in PAGE
    assert f"\n\n{shares}\n\n" in PAGE
    words = re.findall(r": +(.+)", answer)
    assert words[0] == words[1]
    assert f"The answer is *{words[0]}*" in PAGE
    outcomes = [line.rsplit(" | ", 1)[1] for line in steps.splitlines() if "| target |" in line]
    assert sum("kept" in outcome for outcome in outcomes) == 5
    assert sum("is wrong" in outcome for outcome in outcomes) == 1


def test_the_sampler_draws_these_tokens(example: dict[str, Any]) -> None:
    words = example["WORDS"]
    seed = example["SEED"]
    tables = Tables(1, 32, (KVGroup(KVRule(), 16, (0,)),), CPU, host_upload)
    sampler = ReferenceSampler(len(words), tables, host_upload)
    known = np.zeros(example["FIRST"], np.int32)
    assert (
        sampler.add(
            NewRequest(
                0, known, len(known), TokenSampling(seed=seed, temperature=1.0, max_tokens=9)
            )
        )
        is None
    )
    last = example["LAST"]
    drawn = []
    for position in range(example["FIRST"], example["FIRST"] + 5):
        at = np.array([0]), np.array([position])
        for model in (example["DRAFTER"], example["TARGET"]):
            token = int(sampler.sample(torch.tensor([model[last]]), *at).tokens_S)
            assert words[token] == example["choose"](model[last], position)
        last = words[token]
        drawn.append(last)
    assert drawn == example["speculate"](5)[0]


@pytest.mark.parametrize("behind", ["the", "fox"])
def test_drafts_are_right_as_often_as_the_page_says(example: dict[str, Any], behind: str) -> None:
    count = 100_000
    keys = row_keys(np.arange(count, dtype=np.uint64), np.full(count, 3))
    noise = Gumbel(len(example["WORDS"]), CPU)(*torch.from_numpy(keys))[:, : len(example["WORDS"])]
    target, drafter = (torch.tensor(example[name][behind]) for name in ("TARGET", "DRAFTER"))
    right = ((target + noise).argmax(1) == (drafter + noise).argmax(1)).double().mean().item()
    bound, same, best = example["agreement"](behind)
    assert bound < same < best
    assert abs(right - same) < 0.005  # four standard deviations


def test_what_the_page_names_exists() -> None:
    rows = dict(re.findall(r"^\| `([a-z]+)[^`]*` \| .* \| (\d+) \|$", PAGE, re.M))
    assert sorted(rows) == ["eagle", "model", "mtp", "ngram", "suffix"]
    for kind, number in rows.items():
        path = ":DIR" if f"`{kind}:PATH" in PAGE else ""
        assert SpeculationSpec.parse(kind + path).num_drafts == int(number)
    (command,) = re.findall(r"^moeserve (serve .*)$", PAGE, re.M)
    assert build_parser("serve").parse_args(command.split()[1:]).speculate == "ngram:4"
    source = (ROOT / "moeserve/server/metrics.py").read_text()
    metrics = re.findall(rf"`{PREFIX}(spec_decode_\w+)_total`", PAGE)
    assert sorted(metrics) == sorted(set(re.findall(r'"(spec_decode_\w+)"', source)))


def test_the_server_of_the_page_counts_drafts(tmp_path: Path) -> None:
    (flags,) = re.findall(r"^moeserve serve (.*)$", PAGE, re.M)
    (request,) = re.findall(r"/v1/completions .*?-d '(.*?)'", PAGE, re.S)
    body = {**json.loads(request), "logprobs": 1}
    with running_server(tmp_path / "log", *flags.split(), "--max-model-len", "256") as server:
        with_drafts, without = (
            server.post("/v1/completions", {**body, "speculate": x})[1] for x in (True, False)
        )
        metrics = server.get("/metrics")[1]
    assert body["speculate"] is False
    assert with_drafts["choices"] == without["choices"]
    usage = with_drafts["usage"]
    plain = without["usage"]
    assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}  # type: ignore[index]
    right, wrong, _ = usage["completion_tokens_details"].values()  # type: ignore[index]
    counted = dict(
        re.findall(rf"^{PREFIX}(spec_decode_\w+_tokens_total)\{{.*\}} (\d+)", metrics, re.M)
    )
    assert counted["spec_decode_num_accepted_tokens_total"] == str(right) != "0"
    assert counted["spec_decode_num_draft_tokens_total"] == str(right + wrong)
