"""The command line: imports only the module of the chosen command, and turns errors into one line
and an exit code.

Exit codes: 0 ok, 1 failure, 2 usage or configuration, 3 model files, 4 port, 5 memory, 130 Ctrl-C.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from moeserve.version import __version__

if TYPE_CHECKING:
    import argparse


class Command(NamedTuple):
    """One command. `entry` names a module or class with `add_arguments(parser)` and `run(args)`,
    which returns the exit code.
    """

    group: str
    entry: str
    help: str


COMMANDS = {
    "serve": Command("Serve", "serve", "serve a model over an OpenAI-compatible HTTP API"),
    "launch": Command(
        "Serve", "launch", "serve on several machines: start, watch and stop all of them"
    ),
    "pull": Command("Serve", "hub:Pull", "download a model from a Hugging Face hub, or update it"),
    "list": Command("Serve", "hub:List", "list the models that were downloaded"),
    "rm": Command("Serve", "hub:Remove", "remove models that were downloaded"),
    "chat": Command(
        "Talk to a running server",
        "talk:ChatSession",
        "chat in the terminal, or ask one question with -q",
    ),
    "complete": Command(
        "Talk to a running server", "talk:CompleteSession", "complete a text in the terminal"
    ),
    "agent": Command(
        "Talk to a running server",
        "agent",
        "connect a coding agent or another program to a running server",
    ),
    "run-batch": Command(
        "Talk to a running server", "run_batch", "answer a file in OpenAI's Batch format"
    ),
    "bench serve": Command(
        "Measure", "bench.serve", "benchmark a running server, like `vllm bench serve`"
    ),
    "bench latency": Command(
        "Measure", "bench.offline:Latency", "measure the latency of one batch, offline"
    ),
    "bench throughput": Command(
        "Measure", "bench.offline:Throughput", "measure the throughput of many prompts, offline"
    ),
    "tune": Command("Measure", "tune", "tune the GPU kernels' launch parameters for a model"),
    "plan": Command(
        "Measure", "plan", "predict which layout of a model serves a load best on given devices"
    ),
    "simulate": Command(
        "Measure", "simulate", "run a request trace through the scheduler in simulated time"
    ),
    "experts": Command("Inspect", "experts", "show the load of a running server's experts"),
    "verify": Command(
        "Inspect", "verify:Verify", "recompute the answer of a receipt and compare them"
    ),
    "replay": Command(
        "Inspect", "verify:Replay", "recompute a request of a server's request_log and compare"
    ),
    "receipt-key": Command("Inspect", "verify:MakeReceiptKey", "make a key that signs receipts"),
    "config show": Command(
        "Inspect", "config:Show", "print every setting and where its value comes from"
    ),
    "config check": Command("Inspect", "config:Check", "check a settings file for --config"),
    "collect-env": Command(
        "Inspect", "collect_env", "print versions and hardware for a bug report"
    ),
}
USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            # Raises BrokenPipeError here, not at exit, if the reader has ended (`| head`).
            sys.stdout.flush()
    except BrokenPipeError:
        import os

        # Discard the rest of the buffer, which would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else USAGE_ERROR
    if words[0] in ("-V", "--version"):
        print(f"moeserve {__version__}")
        return 0
    name = " ".join(words[:2])
    rest = words[2:]
    if name not in COMMANDS:  # a command of one word, such as `serve`
        name = words[0]
        rest = words[1:]
    if name not in COMMANDS:
        return _no_command(name, rest)
    from moeserve.errors import ConfigError, MoeserveError

    try:
        args = parse(build_parser(name), rest)
        code: int = _entry(name).run(args)
        return code
    except MoeserveError as error:
        print(f"moeserve {name}: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, ConfigError) else FAILURE


def _entry(name: str) -> Any:
    from pkgutil import resolve_name

    return resolve_name(f"moeserve.cli.{COMMANDS[name].entry}")


def build_parser(name: str) -> "argparse.ArgumentParser":
    """Return the parser of one command."""
    import argparse

    class Formatter(argparse.HelpFormatter):
        def __init__(self, prog: str) -> None:
            super().__init__(prog, max_help_position=38, width=120)

    parser = argparse.ArgumentParser(
        f"moeserve {name}",
        description=COMMANDS[name].help,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    _entry(name).add_arguments(parser)
    return parser


def parse(parser: "argparse.ArgumentParser", words: list[str]) -> "argparse.Namespace":
    """Parse a command's arguments. Unknown ones end the process with a hint."""
    known = parser._option_string_actions
    has_serve_flags = "--max-num-seqs" in known
    if not has_serve_flags:
        own, rest = _split_at_rest(words, known)
        args, unknown = parser.parse_known_args(own)
        if rest:
            setattr(args, known[own[-1]].dest, rest)
        foreign: Sequence[str] = ()
    else:  # translate flags of vLLM, SGLang and llama.cpp
        from moeserve.cli.foreign_config import adopt_foreign_file
        from moeserve.cli.foreign_flags import merge, translate
        from moeserve.cli.foreign_table import foreign_table

        translation = translate(words, known)
        args, unknown = parser.parse_known_args(translation.words)
        foreign = [*foreign_table().flags]
        if not unknown:
            merge(args, translation)
            for note in translation.notes:
                print(f"{parser.prog}: {note}", file=sys.stderr)
            adopt_foreign_file(args)
    if unknown:
        _unknown_arguments(parser, unknown, foreign)
    return args


def _split_at_rest(
    words: list[str], known: "Mapping[str, argparse.Action]"
) -> tuple[list[str], list[str]]:
    """Return the words up to a flag that takes all that follow, and those that follow.

    argparse lets such a flag end at "--", which may stand anywhere in the command of another
    program. Directly behind the flag it is dropped.
    """
    for i, word in enumerate(words):
        if word in known and known[word].nargs == "...":
            rest = words[i + 1 :]
            return words[: i + 1], rest[1:] if rest[:1] == ["--"] else rest
    return words, []


def _unknown_arguments(
    parser: "argparse.ArgumentParser", unknown: list[str], foreign: Sequence[str]
) -> NoReturn:
    """End the process with a hint: the nearest flag of the command, or of another server."""
    from difflib import get_close_matches

    word = unknown[0].split("=", 1)[0]
    spelled = word.replace("_", "-").lstrip("-")
    hint = f"`{parser.prog} --help` lists the flags"
    for flags in (parser._option_string_actions, foreign):
        # Compare without dashes, which make short flags look alike.
        names = {flag.lstrip("-"): flag for flag in flags}
        similar = get_close_matches(spelled, names, 1, cutoff=0.7)
        if similar and len(spelled) > 1:  # a single letter resembles nothing
            hint = f"did you mean {names[similar[0]]}?"
            break
    parser.exit(USAGE_ERROR, f"{parser.prog}: unknown argument {word!r}; {hint}\n")


def _no_command(word: str, rest: list[str]) -> int:
    from difflib import get_close_matches

    subcommands = [name for name in COMMANDS if name.startswith(word + " ")]
    if subcommands and (not rest or rest[0] in ("-h", "--help")):
        print(overview(subcommands))
        return 0 if rest else USAGE_ERROR
    unknown = f"{word} {rest[0]}" if subcommands else word
    similar = get_close_matches(unknown, subcommands or list(COMMANDS), 1)
    hint = "`moeserve --help` lists the commands"
    if similar:
        hint = f"did you mean `moeserve {similar[0]}`?"
    print(f"moeserve: unknown command {unknown!r}; {hint}", file=sys.stderr)
    return USAGE_ERROR


def overview(names: Sequence[str] = tuple(COMMANDS)) -> str:
    """Return the list of commands by purpose, which fits on a screen."""
    lines = [
        "moeserve serves Mixture-of-Experts language models.",
        "",
        "usage: moeserve COMMAND [--help] ...",
    ]
    group = ""
    for name in names:
        if COMMANDS[name].group != group:
            group = COMMANDS[name].group
            lines += ["", f"{group}:"]
        lines.append(f"  {name:<18} {COMMANDS[name].help}")
    lines += [
        "",
        "First steps: `moeserve serve` serves the built-in demo model; `moeserve chat` talks to "
        "it.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
