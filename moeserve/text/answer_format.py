"""The seam of answer formats: how a family of models writes reasoning and tool calls into its text.

A format reads answers (text with marks in, parts out) and gives a grammar for answers that a
request constrains. Implementations: `harmony.py`, and `answer_data.py` for the data under
`formats/`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from moeserve.sampling import GrammarSpec
from moeserve.text.json_schema import GrammarFault

# {"type": "function", "function": {"name", "description", "parameters", "strict"}}
Tool = Mapping[str, Any]


class Part(NamedTuple):
    """A piece of an answer. The joined arguments of a call are the text of one JSON object.

    A conversation (`server/conversation.py`) sets number and id.
    """

    # "call" begins a tool call, whose name is `text`; "arguments" belong to the latest call
    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    number: int = -1  # of the tool call, from 0
    id: str = ""  # of the tool call


class ToolFault(GrammarFault):
    """A tool that a format cannot offer the model. field: of its function."""

    def __init__(
        self, tool: Tool, field: Literal["name", "parameters"], message: str, where: str = ""
    ) -> None:
        super().__init__(message, where)
        self.tool = tool
        self.field = field


class AnswerParser(Protocol):
    """Splits one answer into its parts. The answer comes in pieces, and the joined texts do not
    depend on the pieces.
    """

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        """Return the parts that are certain after `text`. final: nothing follows."""


class AnswerFormat(Protocol):
    """One format with one tokenizer. stop_ids: tokens that end an answer besides the model's own
    end tokens.

    prompt: the rendered prompt of the answer; its end shows whether the template has opened the
    reasoning.
    """

    name: str
    stop_ids: tuple[int, ...]

    def parser(
        self,
        tools: Sequence[Tool] = (),
        *,
        prompt: str = "",
        continued: bool = False,
        required: bool = False,
    ) -> AnswerParser:
        """Return the parser of one answer, which takes the text of `Tokenizer.marked_pieces`. It
        gives a call when the call is complete, and only then.

        continued: the answer continues a message of the prompt. required: it must call a tool, so a
        piece of a mark at its end is no content.
        """

    def constraint(
        self,
        tools: Sequence[Tool],
        *,
        required: bool = False,
        parallel: bool = True,
        prompt: str = "",
    ) -> GrammarSpec | None:
        """Return the grammar of an answer, None for any answer.

        Args:
            tools: The tools that the model may call.
            required: There is at least one call. Otherwise calls are free, but if a tool is
                `strict`, calls have known names, and its arguments match its schema.
            parallel: More than one call is allowed.
            prompt: See the class.

        Raise ToolFault for a tool that the format cannot write, GrammarFault if all tools together
        are too large.
        """

    def after_reasoning(self, grammar: GrammarSpec, *, prompt: str = "") -> GrammarSpec:
        """Return the grammar of an answer whose content matches `grammar`; reasoning may come
        first. Raise GrammarFault for grammars that cannot be part of another.
        """

    def call_id(self, name: str, index: int, random: str) -> str:
        """Return an id for the answer's call number `index`, in the form that the model's template
        expects. random: 32 hexadecimal digits for it.
        """
