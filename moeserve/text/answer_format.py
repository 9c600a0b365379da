"""The seam of answer formats: how a family of models writes reasoning and tool calls into its text.

A format reads answers (text with marks in, parts out) and says by a grammar what an answer has to
be where a request demands a tool call. Implementations: `harmony.py`, and `answer_data.py` for the
data under `formats/`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from moeserve.sampling import GrammarSpec

Tool = Mapping[
    str, Any
]  # {"type": "function", "function": {"name", "description", "parameters", "strict"}}


class Part(NamedTuple):
    """A piece of an answer. kind: "call" begins a tool call, whose name is `text`; "arguments"
    belong to the last.

    The joined arguments of a call are the text of one JSON object. number: of the tool call that it
    begins or belongs to, from 0; id: that call's. A conversation sets them
    (`server/conversation.py`).
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    number: int = -1
    id: str = ""


class AnswerParser(Protocol):
    """Splits one answer, which comes in pieces, into its parts: the joined texts do not depend on
    the pieces.
    """

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        """Returns the parts that are certain after `text`. final: nothing follows."""


class AnswerFormat(Protocol):
    """One format with one tokenizer. stop_ids: tokens that end an answer besides the model's own
    end tokens.

    prompt: the rendered prompt of the answer, whose end says whether the template has opened the
    reasoning.
    """

    name: str
    stop_ids: tuple[int, ...]

    def parser(
        self, tools: Sequence[Tool] = (), *, prompt: str = "", continued: bool = False
    ) -> AnswerParser:
        """Returns the parser of one answer, which takes the text of `Tokenizer.marked_pieces`.

        continued: the answer goes on with a message of the prompt. A call comes when it is
        complete, and only then.
        """

    def constraint(
        self,
        tools: Sequence[Tool],
        *,
        required: bool = False,
        parallel: bool = True,
        prompt: str = "",
    ) -> GrammarSpec | None:
        """Returns what an answer must match, None for anything.

        required: at least one call of one of `tools` (of one tool, if it alone is given). Otherwise
        calls are free, but if a tool is `strict`, calls must have known names, and its arguments
        must match its schema. parallel: more than one call is allowed. Raises InvalidRequest for
        schemas that cannot be enforced.
        """

    def after_reasoning(self, grammar: GrammarSpec, *, prompt: str = "") -> GrammarSpec:
        """Returns the grammar of an answer whose content matches `grammar`; reasoning may come
        first.

        Raises InvalidRequest for grammars that cannot be part of another.
        """

    def call_id(self, name: str, index: int, random: str) -> str:
        """Returns an id for the answer's call number `index`, as the model's template expects ids.

        random: 32 hexadecimal digits for it.
        """
