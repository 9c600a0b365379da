"""docs/planning.md shows what the commands and the benchmark printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moeserve.cli.main import main
from moeserve.cli.plan import _print_layouts, _Rated
from moeserve.config import config_of
from moeserve.plan.candidates import Workload, candidates
from moeserve.plan.hardware import read_gpus
from tests.plan.test_candidates import spec_of
from tests.plan.test_roofline import QWEN3_30B

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/planning.md").read_text("utf-8")


def test_the_page_shows_the_layouts_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = candidates(QWEN3_30B, config_of("model", max_model_len=5120), read_gpus("1xH100"))
    load = Workload(1.5, 2000, 500, 1.0, 0.05)
    rated = [_Rated(c.capacity(load), c) for c in found if not c.refused]
    rated.sort(key=lambda rating: -rating.capacity)
    _print_layouts(rated, load)
    assert capsys.readouterr().out.strip() in PAGE


def test_the_page_shows_all_that_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "deepseek-v3").mkdir()
    spec_of("DeepSeek-V3.1", folder)
    monkeypatch.chdir(tmp_path)
    (words,) = re.findall(r"\$ moeserve (plan deepseek-v3 .*)", PAGE)
    assert main(words.split()) == 0
    assert capsys.readouterr().out.strip() in PAGE


def test_the_page_shows_the_published_rows() -> None:
    (file,) = set(re.findall(r"\((?:\.\./)(benchmarks/results/published_[\w-]+\.json)\)", PAGE))
    results = json.loads((ROOT / file).read_text("utf-8"))["results"]
    for row in results["rows"]:
        fitted = " (fitted)" if row["fitted"] else ""
        error = f"{100 * row['error']:+.1f}{fitted}"
        assert (
            f"| {row['what']} | {row['published']:g} | {row['predicted']:g} | {error} | "
            f"{row['source']} |" in PAGE
        )
    assert (
        f"{100 * results['median_error']:.1f} per cent, the worst "
        f"{100 * results['worst_error']:.1f}" in PAGE
    )
