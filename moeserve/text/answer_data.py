"""Answer formats of models, by name or as a checkpoint shows them."""

import re
from collections.abc import Sequence

from msgspec.structs import replace

from moeserve.errors import ConfigError
from moeserve.sampling import GrammarSpec
from moeserve.text.answer_format import AnswerFormat, AnswerParser, Tool
from moeserve.text.answer_grammar import AnswerGrammar, is_free
from moeserve.text.answer_parser import DataParser
from moeserve.text.answer_syntax import ANSWER_FORMATS, Reading, load, names
from moeserve.text.grammar_source import special_tokens
from moeserve.text.harmony import HARMONY, HarmonyFormat
from moeserve.text.json_schema import GrammarFault
from moeserve.text.tokenizer import Tokenizer


class DataFormat:
    """A format that is data, with one tokenizer. template: the chat template; where it never writes
    the format's mark of reasoning, the model does not reason, and its constrained answers have
    none."""

    def __init__(self, name: str, tokenizer: Tokenizer, template: str = "") -> None:
        self.name = name
        self._syntax = load(name)
        think = self._syntax.reasoning
        unthinking = think is not None and bool(template) and think.open not in template
        self._constrained = replace(self._syntax, reasoning=None) if unthinking else self._syntax
        added = tokenizer.backend.get_added_tokens_decoder()
        ids = [tokenizer.backend.token_to_id(stop) for stop in self._syntax.stop]
        self.stop_ids = tuple(token_id for token_id in ids if token_id is not None)
        self._special = special_tokens(tokenizer)
        self._reading = Reading(
            self._syntax, [token.content for token in added.values() if token.special]
        )

    def parser(
        self, tools: Sequence[Tool] = (), *, prompt: str = "", continued: bool = False
    ) -> AnswerParser:
        """Returns the parser of one answer."""
        return DataParser(self._reading, tools, reasons=self._reasons(prompt, continued=continued))

    def constraint(
        self,
        tools: Sequence[Tool],
        *,
        required: bool = False,
        parallel: bool = True,
        prompt: str = "",
    ) -> GrammarSpec | None:
        """Returns what an answer must match, None for anything."""
        if is_free(tools, required=required, parallel=parallel):
            return None
        return self._grammar(prompt).calls(tools, required=required, parallel=parallel)

    def after_reasoning(self, grammar: GrammarSpec, *, prompt: str = "") -> GrammarSpec:
        """Returns the grammar of an answer whose content matches `grammar`."""
        try:
            return self._grammar(prompt).around(grammar)
        except GrammarFault as fault:
            raise fault.as_request_error("grammar") from fault

    def _grammar(self, prompt: str) -> AnswerGrammar:
        opened = self._reasons(prompt, continued=False)
        return AnswerGrammar(self._constrained, self._special, opened=opened)

    def call_id(self, name: str, index: int, random: str) -> str:
        """Returns an id for a call."""
        return self._syntax.calls.id.format(name=name, index=index, random=random)

    def _reasons(self, prompt: str, *, continued: bool) -> bool:
        """Returns whether the answer to a prompt begins inside the reasoning."""
        span = self._syntax.reasoning
        if span is None or not span.open:
            return False
        if continued:
            return prompt.rfind(span.open) > prompt.rfind(span.close)
        return prompt.rstrip().endswith(span.open.rstrip())


def find_format(
    template: str, tokenizer: Tokenizer, name: str | None = None
) -> AnswerFormat | None:
    """Returns the format of a model's answers, None if its chat template shows none. name: the one
    to use instead.

    Raises ConfigError for an unknown name, and for harmony with a tokenizer that lacks its tokens.
    """
    ANSWER_FORMATS.load_plugins()
    known = sorted([*names(), "harmony"])
    if name is not None and name not in known:
        raise ConfigError(f"--tool-format {name!r} is unknown; one of {', '.join(known)}")
    has_harmony = set(HARMONY) <= special_tokens(tokenizer).keys()
    if name == "harmony" and not has_harmony:
        raise ConfigError("--tool-format harmony: the tokenizer has not its tokens")
    if name in ("harmony", None) and has_harmony:
        return HarmonyFormat(tokenizer)
    patterns = {one: load(one).template for one in names()}
    shown = [
        one
        for one, each in patterns.items()
        if each and all(re.search(pattern, template) for pattern in each)
    ]
    picked = name or max(shown, key=lambda one: (len(patterns[one]), one), default=None)
    return DataFormat(picked, tokenizer, template) if picked else None
