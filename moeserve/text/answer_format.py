"""The interface of answer formats: how a model family writes reasoning and tool calls as text.

A format has a parser, which splits answers into parts, and a grammar for constrained answers.
Implementations: `harmony.py` (gpt-oss), and `answer_data.py` for the YAML files in `formats/`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from moeserve.sampling import GrammarSpec
from moeserve.text.json_schema import GrammarFault

# {"type": "function", "function": {"name", "description", "parameters", "strict"}}
Tool = Mapping[str, Any]


class Part(NamedTuple):
    """A piece of an answer. The joined arguments of a call are the text of one JSON object."""

    # "call" begins a tool call with the name `text`; "arguments" belong to the latest call
    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    # Set by `server/conversation.py`:
    number: int = -1  # of the tool call, from 0
    id: str = ""  # of the tool call


class ToolFault(GrammarFault):
    """A tool that a format does not support. field: the field of its function with the fault."""

    def __init__(
        self, tool: Tool, field: Literal["name", "parameters"], message: str, where: str = ""
    ) -> None:
        super().__init__(message, where)
        self.tool = tool
        self.field = field


class AnswerParser(Protocol):
    """Splits one answer into its parts, however it is divided into pieces."""

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        """Return the parts that `text` completes. final: `text` is the end of the answer."""


class AnswerFormat(Protocol):
    """A format with a tokenizer.

    Methods take the rendered `prompt`, because its end shows whether the template has already
    opened the reasoning.
    """

    name: str
    stop_ids: tuple[int, ...]  # tokens that end an answer, in addition to the model's end tokens
    reasons: bool  # whether the model may reason before it answers

    def parser(
        self,
        tools: Sequence[Tool] = (),
        *,
        prompt: str = "",
        continued: bool = False,
        required: bool = False,
        calls: bool = True,
    ) -> AnswerParser:
        """Return the parser of one answer, for the text of `Tokenizer.marked_pieces`.

        The parser returns each call when the call is complete.

        Args:
            tools: The tools in the request.
            prompt: The rendered prompt.
            continued: The answer continues the last message of the prompt.
            required: The answer must call a tool, so an incomplete mark at its end is not content.
            calls: The request offers tools. Otherwise the answer has no calls, even if the model
                writes one.
        """

    def constraint(
        self,
        tools: Sequence[Tool],
        *,
        required: bool = False,
        parallel: bool = True,
        prompt: str = "",
    ) -> GrammarSpec | None:
        """Return the grammar of an answer; None if any answer is allowed.

        Args:
            tools: The tools that the model may call.
            required: The answer has at least one call. Otherwise calls are optional; if a tool is
                `strict`, calls have known names, and the arguments of that tool match its schema.
            parallel: More than one call is allowed.
            prompt: The rendered prompt.

        Raise ToolFault for a tool that the format cannot write, GrammarFault if all tools together
        are too large.
        """

    def after_reasoning(self, grammar: GrammarSpec, *, prompt: str = "") -> GrammarSpec:
        """Return the grammar of an answer with optional reasoning, then content of `grammar`.

        Raise GrammarFault for grammars that cannot be part of another one.
        """

    def call_id(self, name: str, index: int, random: str) -> str:
        """Return an id for call number `index`, in the form that the chat template expects.

        random: 32 hexadecimal digits to use in the id.
        """
