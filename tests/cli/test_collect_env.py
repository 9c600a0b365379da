"""The report for bug reports."""

from __future__ import annotations

import json

import pytest
import yaml

from moeserve.cli import main
from moeserve.version import __version__
from tests.plugin_packages import Install


def test_json_has_what_a_maintainer_asks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESERVE_API_KEY", "s3cret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main.main(["collect-env", "--json", "--no-torch"]) == 0
    text = capsys.readouterr().out
    assert "s3cret" not in text
    found = json.loads(text)
    assert found["moeserve"] == __version__
    assert found["packages"]["aiohttp"]
    assert found["cpu"]["allowed_cores"] >= 1
    assert found["cpu"]["one_rank_computes_on"]
    assert found["cpu"]["numa_nodes"]
    assert found["memory"]["total_bytes"] > 2**28
    assert found["environment"]["OMP_NUM_THREADS"] == "3"
    assert "torch" not in found


def test_plugins_are_listed_with_package_and_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    """Plugins that cannot be loaded or are excluded are listed too."""
    entries = {"moeserve.models": {"A": "no_such:x", "B": "no_such:y"}, "other": {"c": "d:e"}}
    install("my-package", entries, version="2.1")
    monkeypatch.setenv("MOESERVE_PLUGINS", "B,unknown")
    assert main.main(["collect-env", "--json", "--no-torch"]) == 0
    assert json.loads(capsys.readouterr().out)["plugins"] == {
        "moeserve.models": {
            "A": "my-package 2.1, no_such:x (excluded by MOESERVE_PLUGINS)",
            "B": "my-package 2.1, no_such:y",
        }
    }


def test_yaml_includes_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["collect-env"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["memory"]["total_bytes"] > 2**28
    assert found["torch"]["cpu_capability"]
    assert found["torch"]["kernels"]
