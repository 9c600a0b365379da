"""How other programs are connected to a server: environment, arguments, settings.

`assets/agents.yaml` has a table of the programs, with placeholders for what a server decides.
"""

import json
import os
import re
import shlex
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MAX_LINE = 100
_PLACEHOLDER = re.compile(r'("?)\{(\w+)\}\1')


class Agent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program of the table. The table documents the fields."""

    title: str
    install: str = ""
    command: str = ""
    needs: int = 0
    env: dict[str, str] = {}
    args: list[str] = []
    files: dict[str, Any] = {}
    enter: dict[str, str] = {}
    paste: dict[str, Any] = {}
    notes: list[str] = []


class Server(NamedTuple):
    """What a program must know of a server."""

    root: str  # URL without /v1
    key: str
    model: str
    context: int  # tokens

    @property
    def output(self) -> int:
        """The most tokens of an answer. Agents keep so many free in the context."""
        return min(self.context // 4, 32_000)


class Setup(NamedTuple):
    """The settings of a program for one server."""

    env: dict[str, str]
    args: list[str]
    files: dict[str, str]
    enter: dict[str, str]
    paste: dict[str, str]
    notes: list[str]


@cache
def agent_table() -> dict[str, Agent]:
    """Return the known programs by name."""
    text = files("moeserve").joinpath("assets", "agents.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, Agent])


def set_up(agent: Agent, server: Server, directory: Path) -> Setup:
    """Return the settings of `agent`, whose files are in `directory`."""
    values: dict[str, Any] = {
        "root": server.root,
        "url": f"{server.root}/v1",
        "key": server.key,
        "model": server.model,
        "context": server.context,
        "output": server.output,
        "input": server.context - server.output,
        "dir": str(directory),
    }
    return Setup(
        env={name: str(_fill(value, values)) for name, value in agent.env.items()},
        args=[str(_fill(value, values)) for value in agent.args],
        files={name: _text(content, values) for name, content in agent.files.items()},
        enter={name: str(_fill(value, values)) for name, value in agent.enter.items()},
        paste={name: _text(content, values) for name, content in agent.paste.items()},
        notes=[str(_fill(note, values)) for note in agent.notes],
    )


def _fill(value: Any, values: dict[str, Any]) -> Any:
    """Replace the placeholders in a text, or in all texts of nested lists and objects."""
    if isinstance(value, dict):
        return {_fill(key, values): _fill(inner, values) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, values) for inner in value]
    if not isinstance(value, str):
        return value
    if value[:1] + value[-1:] == "{}" and value[1:-1] in values:
        return values[value[1:-1]]

    def filled(found: re.Match[str]) -> str:
        quote, name = found.groups()
        if name not in values:
            return found[0]
        # A string of JavaScript and of TOML is escaped like one of JSON.
        return json.dumps(values[name], ensure_ascii=False) if quote else str(values[name])

    return _PLACEHOLDER.sub(filled, value)


def _text(content: Any, values: dict[str, Any]) -> str:
    if isinstance(content, str):
        return str(_fill(content, values))
    return json.dumps(_fill(content, values), indent=2, ensure_ascii=False) + "\n"


def directory_of(name: str) -> Path:
    """Return the directory in which `moeserve agent` writes files for a program."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "moeserve" / "agents" / name


def shell_word(directory: Path) -> str:
    """Return a directory as a word of the shell, with $HOME."""
    home = Path.home()
    if directory.is_relative_to(home):
        return f'"$HOME"/{shlex.quote(str(directory.relative_to(home)))}'
    return shlex.quote(str(directory))


def write_files(setup: Setup, directory: Path) -> None:
    """Write the files of a setup. Only the user can read them, because they may have a key."""
    if not setup.files:
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in setup.files.items():
        path = directory / name
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")


def shell_lines(agent: Agent, setup: Setup, directory: Path) -> str:
    """Return lines for a shell that connect and start a program, or what to enter elsewhere."""

    def quoted(value: str) -> str:
        before, found, after = value.partition(str(directory))
        if not found:
            return shlex.quote(value)
        parts = [shlex.quote(part) if part else "" for part in (before, after)]
        return shell_word(directory).join(parts)

    lines = [f"# {note}" for note in setup.notes]
    if setup.files:
        lines.append(f"mkdir -p {shell_word(directory)}")
    for name, text in setup.files.items():
        lines += [f"cat > {shell_word(directory)}/{name} <<'EOF'", text.rstrip("\n"), "EOF"]
    lines += [f"export {name}={quoted(value)}" for name, value in setup.env.items()]
    if agent.command:
        lines.append(_command_line([agent.command, *map(quoted, setup.args)]))
    for name, value in setup.enter.items():
        lines.append(f"{name}: {value}")
    for name, text in setup.paste.items():
        lines += [f"{name}:", text.rstrip("\n")]
    return "\n".join(lines)


def _command_line(words: list[str]) -> str:
    """Join the words of a command. A long one gets a line for each flag."""
    joined = " ".join(words)
    if len(joined) <= MAX_LINE:
        return joined
    lines = words[:1]
    for word in words[1:]:
        if word.startswith("-"):
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)
