"""The README's code blocks work as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [code for language, code in BLOCKS if language == "bash"]


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_block_prints_something(code, server):
    code = code.replace("http://127.0.0.1:8000", server.url).replace(
        "AsyncClient()", f"AsyncClient(base_url={server.url + '/v1'!r})"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.strip()) > 20


def test_curl_block_streams_an_answer(server):
    (code,) = [c for c in SHELL if c.startswith("curl")]
    code = code.replace("http://127.0.0.1:8000", server.url)
    run = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, timeout=150, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.rstrip().endswith("data: [DONE]")
    assert run.stdout.count("chat.completion.chunk") > 10


def test_make_blocks_name_real_targets():
    lines = [line for code in SHELL for line in code.splitlines()]
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert targets == ["serve", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_serve_block_has_flags_that_exist(capsys):
    from moeserve.cli.main import main

    flags = {
        word
        for code in SHELL
        if "moeserve serve" in code
        for word in code.split()
        if word[:2] == "--"
    }
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    assert flags == {"--max-model-len", "--dp", "--tp"}
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in flags)


def test_a_person_with_30_seconds_can_read_it():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 120
    assert len(text.split()) <= 1000
