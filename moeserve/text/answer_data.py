"""Answer formats from YAML files, and the choice of a model's format."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache

from msgspec.structs import replace

from moeserve.errors import ConfigError
from moeserve.sampling import GrammarSpec
from moeserve.text.answer_format import AnswerFormat, AnswerParser, Part, Tool, ToolFault
from moeserve.text.answer_grammar import (
    AnswerGrammar,
    arguments_schema,
    is_free,
    tool_name,
    written_call,
)
from moeserve.text.answer_parser import SyntaxParser
from moeserve.text.answer_syntax import ANSWER_FORMATS, PreparedSyntax, load, names
from moeserve.text.grammar_source import special_tokens
from moeserve.text.harmony import HARMONY, HarmonyFormat
from moeserve.text.tokenizer import CONTROL_BEGIN, CONTROL_END, Tokenizer


class DataFormat:
    """A format from a YAML file, with a tokenizer."""

    def __init__(self, name: str, tokenizer: Tokenizer, template: str = "") -> None:
        """Prepare the format.

        Args:
            name: A file in `formats/`, or a plugin.
            tokenizer: The model's tokenizer.
            template: The chat template. If it lacks the format's mark of reasoning, the model does
                not reason, and its constrained answers have no reasoning.
        """
        self.name = name
        self._syntax = load(name)
        # The syntax of constrained answers
        self._constrained = self._syntax
        reasoning = self._syntax.reasoning
        if reasoning is not None and template and reasoning.open not in template:
            self._constrained = replace(self._syntax, reasoning=None)
        self.reasons = self._constrained.reasoning is not None
        added = tokenizer.backend.get_added_tokens_decoder()
        ids = [tokenizer.backend.token_to_id(stop) for stop in self._syntax.stop]
        self.stop_ids = tuple(token_id for token_id in ids if token_id is not None)
        self._special = special_tokens(tokenizer)
        self._prepared_syntax = PreparedSyntax(
            self._syntax, [token.content for token in added.values() if token.special]
        )
        self._can_write = lru_cache(4096)(self._reads_back)

    def parser(
        self,
        tools: Sequence[Tool] = (),
        *,
        prompt: str = "",
        continued: bool = False,
        required: bool = False,
        calls: bool = True,
    ) -> AnswerParser:
        reasons = self._reasons(prompt, continued=continued)
        return SyntaxParser(
            self._prepared_syntax, tools, reasons=reasons, required=required, calls=calls
        )

    def constraint(
        self,
        tools: Sequence[Tool],
        *,
        required: bool = False,
        parallel: bool = True,
        prompt: str = "",
    ) -> GrammarSpec | None:
        for tool in tools:
            if not self._can_write(tool_name(tool), None):
                raise ToolFault(tool, "name", "this model's format of calls cannot write it")
            arguments_schema(tool, strict=required)
        if is_free(tools, required=required, parallel=parallel):
            return None
        return self._grammar(prompt).calls(tools, required=required, parallel=parallel)

    def after_reasoning(self, grammar: GrammarSpec, *, prompt: str = "") -> GrammarSpec:
        return self._grammar(prompt).around(grammar)

    def call_id(self, name: str, index: int, random: str) -> str:
        return self._syntax.calls.id.format(name=name, index=index, random=random)

    def _grammar(self, prompt: str) -> AnswerGrammar:
        return AnswerGrammar(
            self._constrained,
            self._special,
            lambda key: self._can_write("f", key),
            opened=self._reasons(prompt, continued=False),
        )

    def _reads_back(self, name: str, key: str | None) -> bool:
        """Return whether the parser correctly reads a call that the grammar allows.

        name: of the tool. key: of an argument; None: no argument.
        """
        text = written_call(self._syntax, name, key, self._marked)
        tool = {"function": {"name": name}}
        parser = SyntaxParser(self._prepared_syntax, [tool], reasons=False, required=False)
        match parser.push(text, final=True):
            case [Part(kind="call", text=called), Part(kind="arguments", text=arguments)]:
                return called == name and json.loads(arguments) == ({} if key is None else {key: 1})
        return False

    def _marked(self, text: str) -> str:
        """Return a text of the format with special tokens marked, as in answers."""
        names = sorted(self._prepared_syntax.special, key=len, reverse=True)
        pattern = "|".join(map(re.escape, names)) or "(?!)"
        return re.sub(pattern, lambda found: f"{CONTROL_BEGIN}{found[0]}{CONTROL_END}", text)

    def _reasons(self, prompt: str, *, continued: bool) -> bool:
        """Return whether the answer to a prompt begins within the reasoning."""
        span = self._syntax.reasoning
        if span is None or not span.open:
            return False
        if continued:
            return prompt.rfind(span.open) > prompt.rfind(span.close)
        return prompt.rstrip().endswith(span.open.rstrip())


def find_format(
    template: str, tokenizer: Tokenizer, name: str | None = None
) -> AnswerFormat | None:
    """Return the format of a model's answers; None if its chat template matches none.

    name: the format to use instead of the detected one. Raise ConfigError for an unknown name, and
    for harmony if the tokenizer lacks its tokens.
    """
    ANSWER_FORMATS.load_plugins()
    known = sorted([*names(), "harmony"])
    if name is not None and name not in known:
        raise ConfigError(f"--tool-format {name!r} is unknown; one of {', '.join(known)}")
    has_harmony = set(HARMONY) <= special_tokens(tokenizer).keys()
    if name == "harmony" and not has_harmony:
        raise ConfigError("--tool-format harmony: the tokenizer lacks harmony's tokens")
    if name in ("harmony", None) and has_harmony:
        return HarmonyFormat(tokenizer)
    if name is None:
        name = _matching_format(template)
    return None if name is None else DataFormat(name, tokenizer, template)


def _matching_format(template: str) -> str | None:
    """Return the format whose regexes match a chat template, that with the most regexes."""
    regexes = {name: load(name).template for name in names()}
    matching = [
        name
        for name, required in regexes.items()
        if required and all(re.search(regex, template) for regex in required)
    ]
    return max(matching, key=lambda name: (len(regexes[name]), name), default=None)
