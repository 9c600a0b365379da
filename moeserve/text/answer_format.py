"""The seam of answer formats: how a family of models writes reasoning and tool calls into its text.

A format reads answers (text with marks in, parts out) and says by a grammar what an answer has to be where a request
demands a tool call. Implementations: `harmony.py`, and the data under `formats/`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol


class Part(NamedTuple):
    """A piece of an answer. kind: "call" begins a tool call, whose name is `text`; "arguments" belong to the last."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class AnswerParser(Protocol):
    """Splits one answer, which comes in pieces, into its parts: the joined texts do not depend on the pieces."""

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        """Returns the parts that are certain after `text`. final: nothing follows."""
        ...
