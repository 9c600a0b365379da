"""The command line: finds the command, imports only its module, and turns errors into one line and an exit code.

Exit codes: 0 ok, 1 failure, 2 usage or configuration, 3 model files, 4 port, 5 memory, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from moeserve.version import __version__

if TYPE_CHECKING:
    import argparse


class Command(NamedTuple):
    """module has `add_arguments(parser)` and `run(args) -> int` (exit code)."""

    group: str
    module: str
    help: str


COMMANDS = {
    "serve": Command("Serve", "serve", "serve a model over an OpenAI-compatible HTTP API"),
    "chat": Command("Talk to a running server", "chat", "chat in the terminal, or ask one question with -q"),
    "complete": Command("Talk to a running server", "complete", "continue a text"),
    "run-batch": Command("Talk to a running server", "run_batch", "answer a file of OpenAI Batch lines"),
    "bench serve": Command("Measure", "bench.serve", "load a running server, as `vllm bench serve` does"),
    "bench latency": Command("Measure", "bench.latency", "time one batch, offline"),
    "bench throughput": Command("Measure", "bench.throughput", "time many prompts, offline"),
    "bench step": Command("Measure", "bench.step", "host time per engine step with a null runner"),
    "tune": Command("Measure", "tune", "find launch parameters of the GPU kernels for a model"),
    "experts": Command("Look", "experts", "how evenly the experts of a running server are loaded"),
    "config show": Command("Look", "config_show", "print every setting with its origin"),
    "config check": Command("Look", "config_check", "check a --config file without starting anything"),
    "collect-env": Command("Look", "collect_env", "versions and hardware, for a bug report"),
    "completion": Command("Look", "completion", "print a completion script for bash, zsh or fish"),
}
USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else USAGE_ERROR
    if words[0] in ("-V", "--version"):
        print(f"moeserve {__version__}")
        return 0
    name, rest = find_command(words)
    if name not in COMMANDS:
        return _no_command(name, rest)
    try:
        return _run(name, rest)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return FAILURE
    except Exception as error:
        return report(error, name)


def report(error: Exception, name: str) -> int:
    """Prints an error that we raise on purpose and returns its exit code; any other one is our bug and goes on."""
    from moeserve.errors import ConfigError, MoeserveError

    if not isinstance(error, MoeserveError):
        raise error
    print(f"moeserve {name}: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, ConfigError) else FAILURE


def find_command(words: list[str]) -> tuple[str, list[str]]:
    """The command's name (one word or two) and what follows it."""
    if " ".join(words[:2]) in COMMANDS:
        return " ".join(words[:2]), words[2:]
    return words[0], words[1:]


def _run(name: str, rest: list[str]) -> int:
    module = import_module(f"moeserve.cli.{COMMANDS[name].module}")
    parser = build_parser(name)
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        _unknown_arguments(parser, unknown)
    code: int = module.run(args)
    return code


def build_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one command; also what shell completion is made from."""
    import argparse

    class Formatter(argparse.HelpFormatter):
        def __init__(self, prog: str) -> None:
            super().__init__(prog, max_help_position=38, width=120)

    parser = argparse.ArgumentParser(
        f"moeserve {name}", description=COMMANDS[name].help, formatter_class=Formatter, allow_abbrev=False
    )
    import_module(f"moeserve.cli.{COMMANDS[name].module}").add_arguments(parser)
    return parser


def _unknown_arguments(parser: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    from difflib import get_close_matches

    word = unknown[0].split("=", 1)[0]
    near = get_close_matches(word, parser._option_string_actions, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; `{parser.prog} --help` lists what is"
    parser.exit(USAGE_ERROR, f"{parser.prog}: {word!r} is not known here{hint}\n")


def _no_command(word: str, rest: list[str]) -> int:
    from difflib import get_close_matches

    inside = [name for name in COMMANDS if name.startswith(word + " ")]
    if inside and (not rest or rest[0] in ("-h", "--help")):
        print(overview(inside))
        return 0 if rest else USAGE_ERROR
    wrong = f"{word} {rest[0]}" if inside else word
    near = get_close_matches(wrong, inside or list(COMMANDS), 1)
    hint = f"did you mean `moeserve {near[0]}`?" if near else "`moeserve --help` lists the commands"
    print(f"moeserve: unknown command {wrong!r}; {hint}", file=sys.stderr)
    return USAGE_ERROR


def overview(names: Sequence[str] = tuple(COMMANDS)) -> str:
    """One screen: what there is, by purpose."""
    lines = ["moeserve serves Mixture-of-Experts language models.", "", "usage: moeserve COMMAND [--help] ..."]
    group = ""
    for name in names:
        if COMMANDS[name].group != group:
            group = COMMANDS[name].group
            lines += ["", f"{group}:"]
        lines.append(f"  {name:<18} {COMMANDS[name].help}")
    lines += ["", "First steps: `moeserve serve` serves the built-in demo model; `moeserve chat` talks to it."]
    return "\n".join(lines)


def _forget_stdout() -> None:
    """The reader of our output has gone (`| head`): nothing more may be flushed to it at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
