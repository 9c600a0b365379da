"""Harmony, the answer format of gpt-oss: messages on channels, between control tokens.

`<|start|>assistant<|channel|>analysis<|message|>...<|end|>`, where the header may name a recipient, as in
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`. Prompts come from the model's chat
template. Specification: OpenAI's "harmony response format". Its library (openai-harmony) is not used, because it
downloads a vocabulary of its own, while all that answers need of it is this parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from secrets import token_hex
from typing import Literal

from moeserve.text.answer_format import Part, Tool
from moeserve.text.tokenizer import CONTROL_BEGIN, CONTROL_END, HARMONY, Tokenizer

_ENDS = HARMONY[-3:]
_MAX_NAME = 63  # characters of a control token
_CONTROL = re.compile(f"{CONTROL_BEGIN}([^{CONTROL_BEGIN}{CONTROL_END}]{{0,{_MAX_NAME}}}){CONTROL_END}")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser:
    """Splits one answer, which comes in pieces, into its parts: the joined texts do not depend on the pieces.

    Takes the text of `Tokenizer.marked_pieces`, in which text that only looks like a control token differs from it.
    The analysis channel is reasoning; a message to `functions.NAME` is a call; everything else on the channels
    commentary and final is content. in_message: the answer continues a message of the prompt. eager: calls come as they
    are written; otherwise when they are complete.
    """

    def __init__(self, *, in_message: bool = False, eager: bool = True) -> None:
        self._eager = eager
        self._call: list[Part] | None = None  # that is not complete
        self._held = ""  # may be the beginning of a control token
        self._header: str | None = None if in_message else ""  # None inside a message
        self._kind: Literal["content", "reasoning", "arguments"] = "content"
        self._formatted = in_message  # whether a control token came

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        """Returns the parts that are certain after `text`. final: nothing follows."""
        *pieces, rest = _CONTROL.split(self._held + text)
        parts: list[Part] = []
        for before, name in zip(pieces[::2], pieces[1::2], strict=True):
            self._add(before, parts)
            self._control(name, parts)
        begin = rest.rfind(CONTROL_BEGIN)
        keep = begin if begin >= 0 and len(rest) - begin - 1 <= _MAX_NAME and not final else len(rest)
        self._held = rest[keep:]
        self._add(rest.removesuffix(CONTROL_BEGIN) if final else rest[:keep], parts)
        if final and self._header and not self._formatted:  # no harmony at all
            parts.append(Part("content", self._header))
        if final:
            self._end_call(parts, cut=True)
        return parts

    def _add(self, text: str, parts: list[Part]) -> None:
        if self._header is not None:
            self._header += text
        elif text:
            (parts if self._call is None else self._call).append(Part(self._kind, text))

    def _end_call(self, parts: list[Part], *, cut: bool) -> None:
        """Lets a call out, if it is whole. cut: the text ends here; a part of a call is dropped."""
        if self._call is None:
            return
        call, self._call = self._call, None
        arguments = "".join(part.text for part in call[1:])
        try:
            whole = isinstance(json.loads(arguments or "{}"), dict)
        except (ValueError, RecursionError):
            whole = False
        if whole:
            parts += [call[0], Part("arguments", arguments or "{}")]
        elif not cut:
            parts.append(Part("content", arguments))

    def _control(self, name: str, parts: list[Part]) -> None:
        if name not in HARMONY and name != "<|constrain|>":
            return
        self._formatted = True
        if self._header is None and name != "<|constrain|>":
            self._end_call(parts, cut=False)
        if name == "<|message|>" and self._header is not None:
            channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
            self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
            if recipient and recipient[1].startswith("functions."):
                self._kind = "arguments"
                call = Part("call", recipient[1].removeprefix("functions."))
                if self._eager:
                    parts.append(call)
                else:
                    self._call = [call]
            elif recipient:  # a tool that nobody offered
                self._kind = "reasoning"
            self._header = None
        elif name == "<|start|>" or name in _ENDS:
            self._header = ""
        elif name == "<|channel|>" or self._header is not None:
            self._header = (self._header or "") + name


class HarmonyFormat:
    """Harmony as an `AnswerFormat`."""

    name = "harmony"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.stop_ids = tuple(tokenizer.harmony_stops or ())

    def parser(
        self, tools: Sequence[Tool] = (), *, prompt: str = "", continued: bool = False, eager: bool = False
    ) -> HarmonyParser:
        """Returns the parser of one answer."""
        return HarmonyParser(in_message=continued, eager=eager)

    def call_id(self, name: str, index: int) -> str:
        """Returns an id for a call."""
        return f"call_{token_hex(12)}"
