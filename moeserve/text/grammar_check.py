"""Checks the grammars of requests before they reach an engine, with limited time and memory."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from moeserve.sampling import GrammarSpec
from moeserve.text.grammar_limits import digest
from moeserve.text.grammar_source import grammar_source, special_tokens
from moeserve.text.json_schema import GrammarFault, parse_json, subschemas
from moeserve.text.sandbox_pool import SandboxPool
from moeserve.text.sandbox_process import SandboxDied, SandboxProcess
from moeserve.text.tokenizer import Tokenizer

MAX_VERDICTS = 4096  # cached results of checks, of less than 2 kB each
SEARCH_TIMEOUT_S = 0.2  # time to locate an error in a schema
NUM_PROCESSES = 2
# Parts of llguidance's messages to replace
_NOISE_PATTERNS = (
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
# A schema inside Lark: answer formats write Lark around a request's own schemas.
_EMBEDDED = re.compile(r"%json\s+(?=\{)")
# Prefix of llguidance's message -> message for the sender of a schema
_PLAIN_MESSAGES = {
    "NoExtension": "no text matches it",
    "Resource '": "only references inside the schema (#...) are followed",
    "Unimplemented keys": "keywords that cannot be enforced",
    "oneOf constraints are not supported": (
        "oneOf whose schemas may overlap cannot be enforced; use anyOf"
    ),
    "Parser Error: Current row has": "too many alternatives at one place",
}


class GrammarChecker:
    """Compiles each new grammar in a sandbox process (`grammar_sandbox`), which may crash.

    Thread-safe. Processes start with the first grammars; `close` ends them. The latest MAX_VERDICTS
    results are cached by a digest of the grammar.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._special = special_tokens(tokenizer)
        named = [(token_id, name) for name, token_id in self._special.items()]
        vocabulary = json.dumps({"vocab_size": vocab_size, "special": named, "ends": list(end_ids)})
        self._sandboxes = SandboxPool(
            "moeserve.text.grammar_sandbox",
            purpose="new grammars",
            size=NUM_PROCESSES,
            hello=vocabulary.encode(),
        )
        self._lock = threading.Lock()  # of the verdicts
        self._verdicts: OrderedDict[bytes, GrammarFault | None] = OrderedDict()

    def check(self, spec: GrammarSpec, param: str) -> None:
        """Raise InvalidRequest for a grammar that cannot be used. Blocks while it compiles.

        param: the field of the request with the grammar.
        """
        if not self.recall(spec, param):
            fault = self._sandboxes.submit(partial(self._check_uncached, spec)).result()
            _raise_if_fault(fault, param)

    async def check_async(self, spec: GrammarSpec, param: str, owner: str = "") -> None:
        """Run `check` without blocking the event loop, fairly among owners.

        Raise Overloaded if no process is free in time.
        """
        if not self.recall(spec, param):
            fault = await self._sandboxes.run(partial(self._check_uncached, spec), owner)
            _raise_if_fault(fault, param)

    def recall(self, spec: GrammarSpec, param: str) -> bool:
        """Return whether the cache has accepted a grammar. Raise as `check` if it was rejected."""
        key = digest(spec)
        with self._lock:
            if key not in self._verdicts:
                return False
            fault = self._verdicts[key]
        _raise_if_fault(fault, param)
        return True

    def close(self) -> None:
        """End the processes. It blocks."""
        self._sandboxes.close()

    def _check_uncached(self, spec: GrammarSpec, sandbox: SandboxProcess) -> GrammarFault | None:
        key = digest(spec)
        with self._lock:
            if key in self._verdicts:  # another request sent the same grammar meanwhile
                return self._verdicts[key]
        if (fault := self._fault(spec, sandbox)) is not None:
            # A new one without traceback, whose frames would keep the grammar in memory.
            fault = GrammarFault(fault.message, fault.where)
        with self._lock:
            self._verdicts[key] = fault
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return fault

    def _fault(self, spec: GrammarSpec, sandbox: SandboxProcess) -> GrammarFault | None:
        try:
            error = self._compile(spec, sandbox)
        except GrammarFault as fault:
            return fault
        if not error:
            return None
        schema = self._faulty_schema(spec, error, sandbox)
        return GrammarFault(error, self._locate(schema, error, sandbox))

    def _faulty_schema(self, spec: GrammarSpec, error: str, sandbox: SandboxProcess) -> Any:
        """Return the schema with the error: the grammar itself, or one inside of it; {} if none."""
        if spec.kind == "json_schema":
            return parse_json(spec.text)
        deadline_s = monotonic() + SEARCH_TIMEOUT_S
        for match in _EMBEDDED.finditer(spec.text):
            # Raised for literals that only look like a schema, and for schemas with another fault.
            with suppress(ValueError, RecursionError, GrammarFault):
                schema, _ = json.JSONDecoder().raw_decode(spec.text, match.end())
                if monotonic() < deadline_s and self._error_of(schema, sandbox) == error:
                    return schema
        return {}

    def _locate(self, root: Any, error: str, sandbox: SandboxProcess) -> str:
        """Return the pointer to the innermost schema that has the error by itself.

        Definitions are added to each schema that is tried.
        """
        if not isinstance(root, dict):
            return ""
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        where = ""
        schema = root
        deadline_s = monotonic() + SEARCH_TIMEOUT_S
        with suppress(GrammarFault):  # a part by itself may have another fault
            while True:
                for step, inner in subschemas(schema):
                    if monotonic() > deadline_s:
                        return where
                    if self._error_of(inner | shared, sandbox) == error:
                        where += step
                        schema = inner
                        break
                else:
                    break
        return where

    def _error_of(self, schema: Any, sandbox: SandboxProcess) -> str:
        return self._compile(GrammarSpec("json_schema", json.dumps(schema)), sandbox)

    def _compile(self, spec: GrammarSpec, sandbox: SandboxProcess) -> str:
        """Return llguidance's error, "" for none. Raise GrammarFault if the process died."""
        try:
            answer = sandbox.ask(json.dumps(grammar_source(spec, self._special)).encode())
        except SandboxDied as death:
            if death.too_long:
                raise GrammarFault("it takes too long to compile; make it smaller") from None
            raise GrammarFault("it is too large or nested too deeply to compile") from None
        return _plain_message(json.loads(answer))


def _raise_if_fault(fault: GrammarFault | None, param: str) -> None:
    if fault is not None:
        raise fault.as_request_error(param)


def _plain_message(error: str) -> str:
    """Return llguidance's error on one line, without positions in generated sources."""
    for pattern, replacement in _NOISE_PATTERNS:
        error = pattern.sub(replacement, error)
    error = " ".join(error.split())
    for begin, meaning in _PLAIN_MESSAGES.items():
        if error.startswith(begin):
            keys = error.partition(": ")[2] if begin == "Unimplemented keys" else ""
            return f"{meaning}: {keys}" if keys else meaning
    return error[:500]
