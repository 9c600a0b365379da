"""`moeserve chat` and `moeserve complete`: read lines and print streamed answers.

Ctrl-C stops an answer, on the server too; at the prompt it ends the command.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from moeserve.cli.connect import add_server_flags, client_from, model_name
from moeserve.client import AsyncClient, Stream
from moeserve.errors import RequestError


class Session:
    """One conversation with a model."""

    help = ""  # printed at the start and by /help
    quick_help = ""  # the help text of --quick
    max_tokens: int | None = None  # default of --max-tokens

    def __init__(self, client: AsyncClient, model: str, args: argparse.Namespace) -> None:
        self.client = client
        self.args = args
        self.options: dict[str, Any] = {
            "model": model,
            "stream_options": {"include_usage": True},
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
            "seed": args.seed,
        }

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the flags of server, model and sampling."""
        add_server_flags(parser)
        parser.add_argument(
            "--model",
            "--model-name",
            metavar="NAME",
            help="model name (default: the server's first)",
        )
        parser.add_argument("-q", "--quick", metavar="TEXT", help=cls.quick_help)
        parser.add_argument(
            "--max-tokens",
            type=int,
            default=cls.max_tokens,
            metavar="N",
            help=f"maximum tokens of an answer [{cls.max_tokens or 'the context length'}]",
        )
        parser.add_argument(
            "--temperature",
            type=float,
            metavar="T",
            help="sampling temperature; 0: greedy (default: the server's)",
        )
        parser.add_argument(
            "--seed", type=int, metavar="N", help="sampling seed, for repeatable answers"
        )
        parser.add_argument(
            "--stats", action="store_true", help="print time to first token and tokens per second"
        )

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Answer --quick, or each line from the terminal or a pipe. Returns the exit code."""
        with asyncio.Runner() as runner:
            client = client_from(args)
            try:
                name = runner.run(model_name(client, args.model))
                session = cls(client, name, args)
                if args.quick is not None:
                    runner.run(session.answer(args.quick))
                    return 0
                return _answer_lines(runner, session, name)
            finally:
                runner.run(client.close())

    def run_command(self, line: str) -> bool:
        """Run `line` if it is a command of this session. Return whether it is one."""
        return False

    async def answer(self, line: str) -> None:
        """Print the answer to a line while it is streamed."""
        raise NotImplementedError


class CompleteSession(Session):
    """Completes each line as a separate prompt."""

    help = "enter a text to complete; /quit ends, /help prints this; Ctrl-C stops an answer"
    quick_help = "complete this text, and exit"
    max_tokens = 128

    async def answer(self, line: str) -> None:
        stream = await self.client.completions.create(prompt=line, stream=True, **self.options)
        await print_stream(stream, lambda choice: choice.text, stats=self.args.stats)


class ChatSession(Session):
    """A chat. If an answer is stopped or fails, its question is dropped from the conversation."""

    help = "/clear forgets the conversation, /quit ends, /help prints this; Ctrl-C stops an answer"
    quick_help = "send this message, print the answer, and exit"

    def __init__(self, client: AsyncClient, model: str, args: argparse.Namespace) -> None:
        super().__init__(client, model, args)
        self._first_messages: list[dict[str, Any]] = []
        if args.system_prompt:
            self._first_messages.append({"role": "system", "content": args.system_prompt})
        self.messages = [*self._first_messages]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add --system-prompt too."""
        super().add_arguments(parser)
        parser.add_argument(
            "--system-prompt",
            metavar="TEXT",
            help="system message at the start of the conversation",
        )

    def run_command(self, line: str) -> bool:
        """Forget the conversation at /clear. Print the help for any other command."""
        if line == "/clear":
            self.messages = [*self._first_messages]
        elif line.startswith("/"):
            note(self.help)
        return line.startswith("/")

    async def answer(self, line: str) -> None:
        """Print the answer, and the reason if it is cut off; add both to the conversation."""
        messages = [*self.messages, {"role": "user", "content": line}]
        stream = await self.client.chat.completions.create(
            messages=messages, stream=True, **self.options
        )
        text, reason = await print_stream(stream, _content, stats=self.args.stats)
        if reason == "length":
            limit = self.args.max_tokens
            note(
                f"[cut off at --max-tokens {limit}]" if limit else "[cut off: the context is full]"
            )
        self.messages = [*messages, {"role": "assistant", "content": text}]


def _content(choice: Any) -> str | None:
    """Return the new content. Print reasoning and tool calls, which nobody executes, to stderr."""
    delta = choice.delta
    aside = delta.reasoning or delta.reasoning_content or ""
    for call in delta.tool_calls or ():
        function = call.get("function", {})
        if function.get("name"):  # the first chunk of a call
            aside += f"\n[call] {function['name']} "
        aside += function.get("arguments", "")
    if aside:
        note(aside, end="")
    return str(delta.content) if delta.content else None


def _answer_lines(runner: asyncio.Runner, session: Session, name: str) -> int:
    """Answer lines until the input ends. Return the exit code."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - line editing and history for input()

        # \x01 and \x02 enclose escape codes, which readline must not count as columns.
        prompt = "\x01\x1b[1;36m\x02> \x01\x1b[0m\x02" if _has_colour(sys.stdout) else "> "
        note(f"{name}: {session.help}")
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return 0
        if line in ("/quit", "/exit"):
            return 0
        if line == "/help":
            note(session.help)
        elif line and not session.run_command(line):
            try:
                runner.run(session.answer(line))
            except KeyboardInterrupt:
                note("\n[stopped]")
            except RequestError as error:
                print(f"\n{error}", file=sys.stderr)


def note(text: str, end: str = "\n") -> None:
    """Print a note to stderr, dimmed on a terminal unless NO_COLOR is set."""
    shown = f"\x1b[2m{text}\x1b[0m" if _has_colour(sys.stderr) else text
    print(shown, end=end, file=sys.stderr, flush=True)


def _has_colour(out: TextIO) -> bool:
    return out.isatty() and not os.environ.get("NO_COLOR")


async def print_stream(
    stream: Stream[Any], text_of: Callable[[Any], str | None], *, stats: bool
) -> tuple[str, str]:
    """Print each piece as it arrives, and at the end the speed if `stats`. Returns the whole text
    and the finish reason.
    """
    begin_s = time.perf_counter()
    first_s = begin_s
    last_s = begin_s
    num_tokens = 0
    text = ""
    reason = ""
    async with stream:
        async for chunk in stream:
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                if piece := text_of(choice):
                    last_s = time.perf_counter()
                    if not text:
                        first_s = last_s
                    text += piece
                    print(piece, end="", flush=True)
    print(flush=True)
    if stats and text:
        rate = "-"
        if num_tokens > 1 and last_s > first_s:
            rate = f"{(num_tokens - 1) / (last_s - first_s):.1f}"
        note(f"[TTFT {1e3 * (first_s - begin_s):.0f} ms, {num_tokens} tokens, {rate} tok/s]")
    elif stats:
        note("[no tokens]")
    return text, reason
