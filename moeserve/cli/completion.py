"""`moeserve completion bash|zsh|fish`: a script that completes commands and flags, made from the parsers themselves.

source <(moeserve completion bash)        moeserve completion fish > ~/.config/fish/completions/moeserve.fish
"""

from __future__ import annotations

import argparse

from moeserve.cli.main import COMMANDS, build_parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell]())
    return 0


def flags_of(name: str) -> dict[str, str]:
    """Each long or short flag of a command with its help, secrets of argparse included, hidden ones not."""
    flags: dict[str, str] = {}
    for action in build_parser(name)._actions:
        if action.help != argparse.SUPPRESS:
            flags |= dict.fromkeys(action.option_strings, action.help or "")
    return flags


def _first_words() -> list[str]:
    return list(dict.fromkeys(name.split()[0] for name in COMMANDS))


def _second_words(first: str) -> list[str]:
    return [name.split()[1] for name in COMMANDS if name.startswith(first + " ")]


def bash() -> str:
    arms = [f'    "{name}") words="{" ".join(flags_of(name))}" ;;' for name in COMMANDS]
    groups = {first: _second_words(first) for first in _first_words()}
    arms += [f'    "{first}") words="{" ".join(seconds)}" ;;' for first, seconds in groups.items() if seconds]
    first_words = " ".join([*groups, "--version", "--help"])
    two_words = "|".join(first for first, seconds in groups.items() if seconds)
    return "\n".join(
        [
            "# bash completion for moeserve",
            "_moeserve() {",
            '  local current="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words=""',
            f'  case "$command" in {two_words})',
            '    [ "$COMP_CWORD" -gt 2 ] && command="$command ${COMP_WORDS[2]}" ;; esac',
            f'  if [ "$COMP_CWORD" -eq 1 ]; then words="{first_words}"; else case "$command" in',
            *arms,
            "  esac; fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _moeserve moeserve",
        ]
    )


def zsh() -> str:
    """zsh runs bash completions by itself."""
    return "#compdef moeserve\nautoload -U +X bashcompinit && bashcompinit\n" + bash()


def fish() -> str:
    lines = ["# fish completion for moeserve"]
    for first in _first_words():
        help = COMMANDS[first].help if first in COMMANDS else f"{', '.join(_second_words(first))}"
        lines.append(f"complete -c moeserve -f -n __fish_use_subcommand -a {first} -d {_quoted(help)}")
    for name, command in COMMANDS.items():
        first, _, second = name.partition(" ")
        seen = f"__fish_seen_subcommand_from {first}"
        if second:
            fresh = f"{seen}; and not __fish_seen_subcommand_from {' '.join(_second_words(first))}"
            lines.append(f"complete -c moeserve -f -n '{fresh}' -a {second} -d {_quoted(command.help)}")
            seen += f"; and __fish_seen_subcommand_from {second}"
        for flag, help in flags_of(name).items():
            kind = "-l" if flag.startswith("--") else "-s"
            lines.append(f"complete -c moeserve -n '{seen}' {kind} {flag.lstrip('-')} -d {_quoted(help)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'") + "'"
