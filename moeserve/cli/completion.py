"""`moeserve completion bash|zsh|fish`: a script that completes commands and flags, made from the parsers themselves.

source <(moeserve completion bash)        moeserve completion fish > ~/.config/fish/completions/moeserve.fish
"""

from __future__ import annotations

import argparse

from moeserve.cli.main import COMMANDS, build_parser

BASH = """# bash completion for moeserve
_moeserve() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
  case "$command" in {groups})
    [ "$COMP_CWORD" -gt 2 ] && command="$command ${{COMP_WORDS[2]}}" ;; esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{first_words} --version --help"; else case "$command" in
{arms}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _moeserve moeserve"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the name of the shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell]())
    return 0


def flags_of(name: str) -> dict[str, str]:
    """Returns a command's flags with their help, without those that --help leaves out."""
    flags: dict[str, str] = {}
    for action in build_parser(name)._actions:
        if action.help != argparse.SUPPRESS:
            flags |= dict.fromkeys(action.option_strings, action.help or "")
    return flags


def _second_words() -> dict[str, list[str]]:
    """Returns each command's first word with the words that may follow it."""
    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        found.setdefault(first, []).extend([second] if second else [])
    return found


def bash() -> str:
    """Returns the script for bash."""
    groups = {first: seconds for first, seconds in _second_words().items() if seconds}
    words = {name: flags_of(name) for name in COMMANDS} | groups
    arms = [f'    "{name}") words="{" ".join(choices)}" ;;' for name, choices in words.items()]
    return BASH.format(groups="|".join(groups), first_words=" ".join(_second_words()), arms="\n".join(arms))


def zsh() -> str:
    """Returns the script for zsh, which runs bash completions by itself."""
    return "#compdef moeserve\nautoload -U +X bashcompinit && bashcompinit\n" + bash()


def fish() -> str:
    """Returns the script for fish."""
    lines = ["# fish completion for moeserve"]
    groups = _second_words()
    for first, seconds in groups.items():
        help = COMMANDS[first].help if first in COMMANDS else ", ".join(seconds)
        lines.append(f"complete -c moeserve -f -n __fish_use_subcommand -a {first} -d {_quoted(help)}")
    for name, command in COMMANDS.items():
        first, _, second = name.partition(" ")
        seen = f"__fish_seen_subcommand_from {first}"
        if second:
            fresh = f"{seen}; and not __fish_seen_subcommand_from {' '.join(groups[first])}"
            lines.append(f"complete -c moeserve -f -n '{fresh}' -a {second} -d {_quoted(command.help)}")
            seen += f"; and __fish_seen_subcommand_from {second}"
        for flag, help in flags_of(name).items():
            kind = "-l" if flag.startswith("--") else "-s"
            lines.append(f"complete -c moeserve -n '{seen}' {kind} {flag.lstrip('-')} -d {_quoted(help)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'") + "'"
