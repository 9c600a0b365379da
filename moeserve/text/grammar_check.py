"""Checks the grammars of requests before an engine sees them, in bounded time and memory."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from moeserve.sampling import GrammarSpec
from moeserve.text.grammar_source import grammar_source, special_tokens
from moeserve.text.json_schema import GrammarFault, parse_json, subschemas
from moeserve.text.sandbox_process import SandboxDied, SandboxProcess
from moeserve.text.tokenizer import Tokenizer

MAX_VERDICTS = 256
SEARCH_S = 0.2  # for the place of an error in a schema
_NOISE = (  # in llguidance's messages: what to replace, by what
    (re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: |(?=invalid regex))"), ""),
    (re.compile(r"(invalid regex) .*( \(in regex\))", re.DOTALL), r"\1"),
    (re.compile(r"(regex parse error:\n).*\nerror: ", re.DOTALL), r"\1"),
    (
        re.compile(
            r"<non-verbose/>|; following .*|; consider making.*|\n +1 \|.*|\n +while .*", re.DOTALL
        ),
        "",
    ),
)
_EMBEDDED = re.compile(
    r"%json\s+(?=\{)"
)  # a schema in Lark, as answer formats have it around a request's own
_MEANING = {
    "NoExtension": "no text matches it",
    "Resource '": "only references inside the schema (#...) are followed",
    "Unimplemented keys": "keywords that cannot be enforced",
    "oneOf constraints are not supported": "oneOf whose schemas may overlap cannot be enforced; use anyOf",
    "Parser Error: Current row has": "too many alternatives at one place",
}


class GrammarChecker:
    """Compiles each new grammar in a process of its own (`grammar_sandbox`), which may die of it.

    Thread-safe; `check` blocks. The process starts with the first grammar, and again after a death.
    Verdicts are kept.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._special = special_tokens(tokenizer)
        named = [(token_id, name) for name, token_id in self._special.items()]
        vocabulary = json.dumps({"vocab_size": vocab_size, "special": named, "ends": list(end_ids)})
        self._sandbox = SandboxProcess(
            "moeserve.text.grammar_sandbox", hello=vocabulary.encode() + b"\n"
        )
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[GrammarSpec, GrammarFault | None] = OrderedDict()

    def check(self, spec: GrammarSpec, param: str) -> None:
        """Raises InvalidRequest for a grammar that cannot be used. param: the field of the request
        that holds it.
        """
        if self.recall(spec, param):
            return
        with self._lock:
            if spec not in self._verdicts:
                self._verdicts[spec] = self._fault(spec)
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        self.recall(spec, param)

    def recall(self, spec: GrammarSpec, param: str) -> bool:
        """Returns whether a grammar was accepted before, without blocking. Raises as `check` does
        if it was refused.
        """
        fault = self._verdicts.get(spec)
        if fault is not None:
            raise fault.as_request_error(param)
        return spec in self._verdicts

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._sandbox.close()

    def _fault(self, spec: GrammarSpec) -> GrammarFault | None:
        try:
            error = self._compile(spec)
        except GrammarFault as fault:
            return fault
        return GrammarFault(error, self._place(self._schema(spec, error), error)) if error else None

    def _schema(self, spec: GrammarSpec, error: str) -> Any:
        """Returns the schema that has the error: the grammar itself, or one inside of it; {} if
        none has.
        """
        if spec.kind == "json_schema":
            return parse_json(spec.text)
        until = monotonic() + SEARCH_S
        for match in _EMBEDDED.finditer(spec.text):
            with suppress(
                ValueError, RecursionError, GrammarFault
            ):  # in a literal, or with another fault alone
                schema, _ = json.JSONDecoder().raw_decode(spec.text, match.end())
                if (
                    monotonic() < until
                    and self._compile(GrammarSpec("json_schema", json.dumps(schema))) == error
                ):
                    return schema
        return {}

    def _place(self, root: Any, error: str) -> str:
        """Returns the pointer to the innermost schema that alone, beside the definitions, has the
        same error.
        """
        definitions = (
            {key: root[key] for key in ("$defs", "definitions") if key in root} if root else {}
        )
        where = ""
        schema = root if isinstance(root, dict) else {}
        until = monotonic() + SEARCH_S
        with suppress(GrammarFault):  # another error, of one part alone
            while True:
                for step, inner in subschemas(schema):
                    if monotonic() > until:
                        return where
                    if (
                        self._compile(GrammarSpec("json_schema", json.dumps(inner | definitions)))
                        == error
                    ):
                        where = where + step
                        schema = inner
                        break
                else:
                    break
        return where

    def _compile(self, spec: GrammarSpec) -> str:
        """Returns llguidance's error, "" for none. Raises GrammarFault if the process died of it."""
        try:
            answer = self._sandbox.ask(json.dumps(grammar_source(spec, self._special)).encode())
        except SandboxDied as death:
            if death.too_long:
                raise GrammarFault("it takes too long to compile; make it smaller") from None
            raise GrammarFault("it is too large or nested too deeply to compile") from None
        return _plain(json.loads(answer))


def _plain(error: str) -> str:
    """Returns llguidance's error on one line, without its places in sources that the sender has not
    written.
    """
    for pattern, by in _NOISE:
        error = pattern.sub(by, error)
    error = " ".join(error.split())
    for begin, meaning in _MEANING.items():
        if error.startswith(begin):
            keys = error.partition(": ")[2] if begin == "Unimplemented keys" else ""
            return f"{meaning}: {keys}" if keys else meaning
    return error[:500]
