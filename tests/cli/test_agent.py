"""`moeserve agent` against a real server. --run starts executables that print what they get."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moeserve.cli import main
from moeserve.cli.agent_setup import Server, agent_table, set_up, shell_lines
from tests.server.conftest import Live, live_server, make_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
KEY = "sk-of-the-server"
FAKE = Server("http://127.0.0.1:8000", "none", "qwen3-30b-a3b", 65536)
PRINTS = """#!/bin/sh
env
for word in "$@"; do echo "word: $word"; done
exit 7
"""


@pytest.fixture
async def server() -> AsyncIterator[Live]:
    async with live_server(make_tokenizer(), api_key=(KEY,)) as live:
        yield live


async def agent(*words: str) -> int:
    """Run `moeserve agent` while the server runs in this event loop."""
    return await asyncio.to_thread(main.main, ["agent", *words])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


@pytest.fixture
def program(home: Path) -> Path:
    """Return a directory for the PATH with an executable for each program."""
    folder = home / "bin"
    folder.mkdir()
    for known in agent_table().values():
        if known.command:
            path = folder / known.command
            path.write_text(PRINTS)
            path.chmod(0o755)
    return folder


async def started(path: Path | str, *words: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of `moeserve agent` as a process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "moeserve.cli.main",
        "agent",
        *words,
        env=os.environ | {"PATH": f"{path}:/bin:/usr/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


def test_alone_it_lists_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["agent"]) == 0
    printed = capsys.readouterr().out
    for name, known in agent_table().items():
        assert re.search(rf"^  {name} +{re.escape(known.title)}$", printed, re.MULTILINE)


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
async def test_the_lines_name_the_server_its_model_and_its_context(
    tail: str, server: Live, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await agent("claude", "--url", server.url + tail, "--api-key", KEY) == 0
    printed = capsys.readouterr()
    assert printed.err == (
        "moeserve agent: Claude Code needs a context of 65,536 tokens or more, and org/tiny has "
        "256\n"
    )
    lines = printed.out.splitlines()
    assert f"export ANTHROPIC_BASE_URL={server.url}" in lines
    assert f"export ANTHROPIC_AUTH_TOKEN={KEY}" in lines
    assert "export ANTHROPIC_MODEL=org/tiny" in lines
    assert f"export CLAUDE_CODE_MAX_CONTEXT_TOKENS={server.engine.context}" in lines
    assert lines[-1] == "claude"


async def test_the_shell_takes_the_lines(
    server: Live, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Printed and started, a program gets the same variables, words and files."""
    for name, known in agent_table().items():
        assert await agent(name, "--url", server.url, "--api-key", KEY) == 0
        lines = capsys.readouterr().out
        if not known.command:
            continue
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            lines,
            env=os.environ | {"PATH": f"{program}:/bin:/usr/bin"},
            stdout=subprocess.PIPE,
        )
        by_shell = (await process.communicate())[0].decode()
        written = {
            path: path.read_text()
            for path in program.parent.glob(f".config/moeserve/agents/{name}/*")
        }
        status, by_run, errors = await started(
            program, name, "--url", server.url, "--api-key", KEY, "--run"
        )
        assert status == 7
        assert ("needs a context" in errors) == bool(known.needs)
        wanted = [f"{variable}=" for variable in known.env] + ["word: "]
        assert _of(by_run, wanted) == _of(by_shell, wanted)
        assert len(_of(by_run, wanted)) == len(known.env) + len(known.args)
        assert {path: path.read_text() for path in written} == written
        assert len(written) == len(known.files)


def _of(output: str, wanted: list[str]) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith(tuple(wanted)))


@pytest.mark.parametrize(
    "words", [["-p", "--url", "--", "x y"], ["--", "-p", "--url", "--", "x y"]]
)
async def test_words_after_run_are_the_programs(
    words: list[str], server: Live, program: Path
) -> None:
    status, output, errors = await started(
        program, "opencode", "--url", server.url, "--api-key", KEY, "--run", *words
    )
    assert status == 7, errors
    assert [line for line in output.splitlines() if line.startswith("word: ")] == [
        "word: -p",
        "word: --url",
        "word: --",
        "word: x y",
    ]


async def test_files_are_private_and_the_users_own_stay(server: Live, program: Path) -> None:
    own = program.parent / ".config" / "opencode" / "opencode.json"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    words = ("opencode", "--url", server.url, "--api-key", KEY, "--run")
    for _ in range(2):  # the second time, the files are there
        assert (await started(program, *words))[0] == 7
    written = program.parent / ".config" / "moeserve" / "agents" / "opencode" / "opencode.json"
    assert json.loads(written.read_text())["model"] == "moeserve/org/tiny"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert own.read_text() == "mine"
    made = {path.name for path in (program.parent / ".config").rglob("*.*")}
    assert made == {"opencode.json"}


async def test_a_program_that_is_not_installed(server: Live, home: Path) -> None:
    status, output, errors = await started(
        "/nowhere", "codex", "--url", server.url, "--api-key", KEY, "--run"
    )
    assert (status, output) == (2, "")
    assert "there is no codex on the PATH; `npm install -g @openai/codex` installs it" in errors
    assert "Traceback" not in errors
    assert not (home / ".config").exists()


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["clade"], 2, "unknown program 'clade'; did you mean claude? known are claude, codex,"),
        (["--run", "claude"], 2, "--run needs the name of a program"),
        (["claude"], 1, "API key"),
        (["claude", "--api-key", "wrong"], 1, "API key"),
        (["claude", "--api-key", KEY, "--model", "gpt"], 2, "has no 'gpt', only org/tiny"),
        (["zed", "--api-key", KEY, "--run"], 2, "Zed cannot be started here; leave out --run"),
    ],
)
async def test_errors_are_one_line(
    words: list[str],
    status: int,
    told: str,
    server: Live,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await agent("--url", server.url, *words) == status
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["agent", "claude", "--url", "http://127.0.0.1:9"]) == 1
    assert "is the server running there?" in capsys.readouterr().err


# --- The table

MODELS = ["qwen3-30b-a3b", 'a "quoted" $HOME `model`', "a'b\\c", "org/{context}", "😀"]


@pytest.mark.parametrize("name", agent_table())
@pytest.mark.parametrize("model", MODELS)
def test_files_are_readable_with_any_name(name: str, model: str) -> None:
    known = agent_table()[name]
    setup = set_up(known, FAKE._replace(model=model), Path("/dir"))
    texts = setup.files | setup.paste
    for file, text in texts.items():
        content: Any = None
        if file.endswith(".toml"):
            import tomllib

            content = tomllib.loads(text)
        elif file.endswith((".json", ".yaml")):
            content = yaml.safe_load(text)
        if content is not None and "model}" in str(known.files | known.paste):
            assert any(model in found for found in _strings(content))
    for word in [*setup.args, *setup.env.values(), *setup.enter.values(), *setup.notes]:
        assert not re.search(r"\{(root|url|key|model|output|input|dir)\}", word)
    if name == "codex":
        import tomllib

        overrides = [word for word in setup.args if word != "-c"]
        assert tomllib.loads("\n".join(overrides))["model"] == model


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for inner in pair for text in _strings(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _strings(inner)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", agent_table())
def test_every_program_can_be_installed_or_is_set_up_by_hand(name: str) -> None:
    known = agent_table()[name]
    assert bool(known.command) == bool(known.install)
    assert known.command or known.enter or known.paste
    assert "dir}" in str([*known.env.values(), *known.args]) or not known.files


@pytest.mark.parametrize("name", agent_table())
def test_the_page_shows_what_the_command_prints(name: str) -> None:
    known = agent_table()[name]
    directory = Path.home() / ".config" / "moeserve" / "agents" / name
    block = shell_lines(known, set_up(known, FAKE, directory), directory)
    _, _, section = PAGE.read_text().partition(f"\n### {known.title}\n")
    section, _, _ = section.partition("\n### ")
    language = "bash" if known.command else "text"
    assert f"\n```{language}\n{block}\n```\n" in section, block
    assert f"`moeserve agent {name}`" in section
    assert known.install in section
