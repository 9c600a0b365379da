"""Completion scripts work in their shells."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from moeserve.cli import main
from moeserve.cli.completion import bash, fish, zsh
from moeserve.cli.main import COMMANDS


@pytest.mark.parametrize(
    ("line", "some"),
    [
        (["moeserve", ""], {"serve", "chat", "bench", "config", "--version"}),
        (["moeserve", "ser"], {"serve"}),
        (["moeserve", "bench", ""], {"serve", "latency", "throughput"}),
        (["moeserve", "serve", "--max-m"], {"--max-model-len"}),
        (["moeserve", "bench", "serve", "--num-p"], {"--num-prompts"}),
        (["moeserve", "config", "check", "--he"], {"--help"}),
    ],
)
def test_bash_completes(line: list[str], some: set[str]) -> None:
    words = " ".join(f"'{word}'" for word in line)
    script = f"{bash()}\nCOMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _moeserve; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    assert some <= set(done.stdout.split())
    assert done.stderr == ""
    if line[-1]:
        assert set(done.stdout.split()) == some


@pytest.mark.parametrize(("shell", "script"), [("zsh", zsh), ("fish", fish)])
def test_other_shells_parse_the_script(shell: str, script: object) -> None:
    assert callable(script)
    text = script()
    assert all(name.split()[0] in text for name in COMMANDS)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_fish_knows_flags_with_their_help() -> None:
    text = fish()
    assert "-l max-model-len -d 'longest prompt plus answer in tokens" in text
    assert text.count("'") % 2 == text.count("\\'") % 2


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef moeserve")
    with pytest.raises(SystemExit):
        main.main(["completion", "tcsh"])
