"""The checks of client libraries: what runs without the libraries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tools.clients.run import COLUMNS, HERE, scripts, table

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()


def test_the_page_has_the_results_of_each_script():
    header = table([]).splitlines()[0]
    results = PAGE[PAGE.index(header) :]
    for path in scripts([]):
        text = path.read_text()
        names = re.findall(r'^    client = "(.+)"$|^await run\(\'(.+?)\'', text, re.M)
        for name in filter(None, (name for pair in names for name in pair)):
            assert f"| {name} " in results, f"{path.name}: {name}"


def test_checks_in_both_languages_are_the_same():
    in_python = re.findall(r'"(\w+)"', (HERE / "checks.py").read_text().partition("NAMES = (")[2])
    in_javascript = re.findall(
        r"'(\w+)'", (HERE / "checks.mjs").read_text().partition("NAMES =")[2]
    )
    assert in_python[: len(COLUMNS)] == in_javascript[: len(COLUMNS)] == [*COLUMNS]


def test_the_table_has_a_row_per_client_and_api():
    result = {"client": "a", "version": "1", "api": "chat", "error": None}
    results = [
        result | {"check": "first_chat"},
        result | {"check": "overflow", "error": "bad"},
        result | {"check": "first_chat", "api": "responses"},
    ]
    assert table(results).splitlines()[2:] == [
        "| a 1 | chat | yes |  |  |  |  | fails |",
        "| a 1 | responses | yes |  |  |  |  |  |",
    ]


def test_unknown_names_are_refused():
    command = [sys.executable, HERE / "run.py", "no-such-client"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("unknown: no-such-client; there are agent_framework, ")
