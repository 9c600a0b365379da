"""Harmony, the answer format of gpt-oss: messages on channels, between control tokens.

`<|start|>assistant<|channel|>analysis<|message|>...<|end|>`, where the header may name a recipient,
as in `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`. Prompts
come from the model's chat template. Specification: OpenAI's "harmony response format". Its library
(openai-harmony) is not used, because it downloads a vocabulary of its own, while all that answers
need of it is this parser.
"""

import re
from collections.abc import Sequence
from typing import Literal

from moeserve.sampling import GrammarSpec
from moeserve.text.answer_arguments import json_rule
from moeserve.text.answer_format import Part, Tool, ToolFault
from moeserve.text.answer_grammar import arguments_schema, is_free, tool_name
from moeserve.text.answer_values import as_json
from moeserve.text.grammar_limits import answer_spec
from moeserve.text.grammar_source import lark_of, special_tokens
from moeserve.text.lark import exactly
from moeserve.text.tokenizer import CONTROL_BEGIN, CONTROL_END, Tokenizer

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_END_TOKENS = HARMONY[-3:]
_MAX_CONTROL_LENGTH = 63  # characters of a control token
_CONTROL = re.compile(
    f"{CONTROL_BEGIN}([^{CONTROL_BEGIN}{CONTROL_END}]{{0,{_MAX_CONTROL_LENGTH}}}){CONTROL_END}"
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_TOOL_NAME = re.compile(r"[^\s<]+")  # of a tool


class HarmonyParser:
    """Splits one answer into its parts.

    The analysis channel is reasoning, a message to `functions.NAME` is a call, and everything else
    on the channels commentary and final is content. The text is that of `Tokenizer.marked_pieces`,
    in which control tokens differ from text that looks like them.
    """

    def __init__(self, *, in_message: bool = False, calls: bool = True) -> None:
        """Begin an answer.

        Args:
            in_message: The answer continues a message of the prompt.
            calls: The request offers tools.
        """
        self._reads_calls = calls
        self._call_name: str | None = None  # of an incomplete call
        self._call_arguments: list[str] = []  # in pieces
        self._held = ""  # possibly the beginning of a control token
        self._header: str | None = None if in_message else ""  # None within a message
        self._kind: Literal["content", "reasoning"] = "content"
        self._has_control = in_message  # a control token has occurred

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        *pieces, rest = _CONTROL.split(self._held + text)
        parts: list[Part] = []
        for before, name in zip(pieces[::2], pieces[1::2], strict=True):
            self._add(before, parts)
            self._handle_control(name, parts)
        begin = rest.rfind(CONTROL_BEGIN)
        num_decided = len(rest)
        if begin >= 0 and len(rest) - begin - 1 <= _MAX_CONTROL_LENGTH and not final:
            num_decided = begin  # the rest may become a control token
        self._held = rest[num_decided:]
        self._add(rest.removesuffix(CONTROL_BEGIN) if final else rest[:num_decided], parts)
        if final and self._header and not self._has_control:  # no harmony at all
            parts.append(Part("content", self._header))
        if final:
            self._end_call(parts, is_cut=True)
        return parts

    def _add(self, text: str, parts: list[Part]) -> None:
        if self._header is not None:
            self._header += text
        elif self._call_name is not None:
            self._call_arguments.append(text)
        elif text:
            parts.append(Part(self._kind, text))

    def _end_call(self, parts: list[Part], *, is_cut: bool) -> None:
        """Add the call to the parts if it is complete. is_cut: otherwise drop it."""
        name = self._call_name
        if name is None:
            return
        self._call_name = None
        arguments_text = "".join(self._call_arguments).strip()
        if not arguments_text and not is_cut:
            arguments_text = "{}"
        arguments = as_json(arguments_text)
        if arguments.startswith("{"):
            parts += [Part("call", name), Part("arguments", arguments)]
        elif not is_cut:
            parts.append(Part("content", arguments_text))

    def _handle_control(self, name: str, parts: list[Part]) -> None:
        if name not in HARMONY and name != "<|constrain|>":
            return
        self._has_control = True
        if self._header is None and name != "<|constrain|>":
            self._end_call(parts, is_cut=False)
        if name == "<|message|>" and self._header is not None:
            channel = _CHANNEL.search(self._header)
            recipient = _RECIPIENT.search(self._header)
            self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
            if recipient and recipient[1].startswith("functions.") and self._reads_calls:
                self._call_name = recipient[1].removeprefix("functions.")
                self._call_arguments = []
            elif recipient:  # a tool that the request did not offer, or one built into gpt-oss
                self._kind = "reasoning"
            self._header = None
        elif name == "<|start|>" or name in _END_TOKENS:
            self._header = ""
        elif name == "<|channel|>" or self._header is not None:
            self._header = (self._header or "") + name


_GRAMMAR = """start: (message <|end|> <|start|> "assistant"){0,4} last
message: <|channel|> CHANNELS <|message|> TEXT
TEXT: /(.|\\n)*/
"""
_FINAL_MESSAGE = '<|channel|> "final" <|message|>'
_CALL_BEGIN = "<|channel|>"
_JSON_MESSAGE = '<|constrain|> "json" <|message|>'
_CONTROL_TOKEN = re.compile(r"<\|\w+\|>")


class HarmonyFormat:
    """Harmony as an `AnswerFormat`, with a tokenizer that has its tokens. A call ends an answer."""

    name = "harmony"
    reasons = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = special_tokens(tokenizer)
        self.stop_ids = tuple(self._special[name] for name in HARMONY[-2:])

    def parser(
        self,
        tools: Sequence[Tool] = (),
        *,
        prompt: str = "",
        continued: bool = False,
        required: bool = False,
        calls: bool = True,
    ) -> HarmonyParser:
        return HarmonyParser(in_message=continued, calls=calls)

    def constraint(
        self,
        tools: Sequence[Tool],
        *,
        required: bool = False,
        parallel: bool = True,
        prompt: str = "",
    ) -> GrammarSpec | None:
        schemas = [arguments_schema(tool, strict=required) for tool in tools]
        for tool in tools:
            if not _TOOL_NAME.fullmatch(tool_name(tool)):
                raise ToolFault(tool, "name", "this model's format of calls cannot write it")
        # A call ends the answer, so there is never more than one, whatever `parallel` is.
        if is_free(tools, required=required, parallel=True):
            return None
        calls = []
        for tool, schema in zip(tools, schemas, strict=True):
            header = f"/{exactly(f'commentary to=functions.{tool_name(tool)} ')}/"
            begin = f"{self._marked(_CALL_BEGIN)} {header} {self._marked(_JSON_MESSAGE)}"
            calls.append(f"{begin} {json_rule(schema)}")
        last = calls if required else [f"{self._marked(_FINAL_MESSAGE)} TEXT", *calls]
        return self._spec(" | ".join(last))

    def after_reasoning(self, grammar: GrammarSpec, *, prompt: str = "") -> GrammarSpec:
        content = f"%lark {{\n{lark_of(grammar, self._special)}\n}}"
        return self._spec(f"{self._marked(_FINAL_MESSAGE)} {content}", channels='"analysis"')

    def call_id(self, name: str, index: int, random: str) -> str:
        return f"call_{random[:24]}"

    def _spec(self, last: str, channels: str = '("analysis" | "commentary")') -> GrammarSpec:
        """Return the grammar of messages on `channels`, and of the last one. Raise GrammarFault."""
        return answer_spec(f"{self._marked(_GRAMMAR).replace('CHANNELS', channels)}last: {last}")

    def _marked(self, lark: str) -> str:
        """Return Lark with the ids of its control tokens."""
        return _CONTROL_TOKEN.sub(lambda found: f"<[{self._special[found[0]]}]>", lark)
