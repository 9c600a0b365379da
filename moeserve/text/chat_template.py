"""Renders chat messages as prompt text by the model's own Jinja template (`template_files` finds it).

Templates come with checkpoints and so may be anybody's code: `_Sandbox` bounds what they reach, their time and their
memory. Rendering may still take seconds, so call it in a thread.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from moeserve.errors import CheckpointError, InvalidRequest
from moeserve.text.template_files import MAX_TEMPLATE_CHARS, find_templates
from moeserve.text.tokenizer import MARK, Tokenizer

_NOT_ASCII = re.compile(f"[^\0-~{MARK}]+")
_CONTINUE = "\ufdd3"  # ends the message to be continued while the template works on it
# fmt: off
_REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message, the first that is there counts
_RESERVED = frozenset((
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length",
))
_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "escape", "e", "first", "float", "int", "items", "last",
    "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "safe", "select",
    "selectattr", "sort", "string", "sum", "title", "trim", "unique", "upper",
)
_TEXT_METHODS = frozenset((
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit",
    "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "swapcase", "title", "upper",
))
# fmt: on
MAX_CHARS = 64 * 2**20  # of any text that a template makes
MAX_SECONDS = 5.0  # of one rendering
MAX_INDENT = 64
MAX_KWARGS = 32
MAX_KWARG_CHARS = 4096


class ChatTemplate:
    """A compiled template. origin: the file that it came from, for error messages; for_tools: its variant for tools.

    takes_tools: whether it shows the model tools that it may call; takes_calls: whether it shows earlier calls.
    """

    def __init__(self, source: str, *, origin: str = "chat template", for_tools: str | None = None) -> None:
        """Raises CheckpointError for a template that does not compile or reaches outside the sandbox."""
        self.source = source
        self.source_for_tools = for_tools or source
        try:
            if max(len(source), len(for_tools or "")) > MAX_TEMPLATE_CHARS:
                raise SecurityError(f"a chat template has at most {MAX_TEMPLATE_CHARS:,} characters")
            self._template = _ENVIRONMENT.from_string(source)
            self._for_tools = self._template if for_tools is None else _ENVIRONMENT.from_string(for_tools)
            variables = find_undeclared_variables(_ENVIRONMENT.parse(self.source_for_tools))
            self.takes_tools = "tools" in variables
            self.takes_calls = "tool_calls" in self.source_for_tools
            self._probe()
        except (jinja2.TemplateError, OverflowError, RecursionError) as error:
            line = f" line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise CheckpointError(f"{origin}{line}: refused: {error}. Pass another with --chat-template") from error

    @classmethod
    def load(cls, model_dir: Path, override: Path | str | None = None) -> ChatTemplate | None:
        """Reads a model's template, or the file `override`. Returns None if there is none, as for base models."""
        found = find_templates(model_dir, override)
        return None if found is None else cls(found.text, origin=found.origin, for_tools=found.for_tools)

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt for `Tokenizer.encode_prompt`, with control tokens typed by users marked.

        Contents are strings or lists of text parts; a tool call's arguments are an object, not JSON text. Raises
        InvalidRequest if the template rejects the messages.
        """
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        shield = tokenizer.control.shield
        shielded = [_shielded(message, shield) for message in messages]
        if continue_final_message:
            if not isinstance(shielded[-1].get("content"), str):
                raise InvalidRequest("the final message has no text to continue", param="messages")
            shielded[-1]["content"] += _CONTINUE + " "
        _check_kwargs(kwargs or {})
        variables = {name: shield(v) if isinstance(v, str) else v for name, v in (kwargs or {}).items()}
        variables |= tokenizer.special_tokens
        variables |= {"tools": _shield_all(tools, shield), "add_generation_prompt": add_generation_prompt}
        try:
            text = self._run(variables | {"messages": shielded})
        except Exception as error:  # a template is a program: it may fail in any way on these messages
            what = f"fails on these messages ({type(error).__name__})"
            if isinstance(error, SecurityError | OverflowError):
                what = f"exceeds its limits: {str(error)[:200]}"
            elif type(error) is jinja2.TemplateError:  # by raise_exception()
                what = f"rejects these messages: {str(error)[:200]}"
            raise InvalidRequest(f"the model's chat template {what}", param="messages") from error
        if not continue_final_message:
            return text
        text, found, rest = text.rpartition(_CONTINUE)
        if not found:
            what = "the chat template drops the final message, so it cannot be continued"
            raise InvalidRequest(what, param="continue_final_message")
        return text if rest.startswith(" ") else text.rstrip()  # the template trims contents

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Returns the token ids of `render`, which takes the same options."""
        return tokenizer.encode_prompt(self.render(tokenizer, messages, **options))

    def _run(self, variables: dict[str, Any]) -> str:
        token = _deadline_s.set(time.monotonic() + MAX_SECONDS)
        try:
            template = self._template if variables.get("tools") is None else self._for_tools
            return _join(template.generate({"tools": None, "documents": None} | variables))
        finally:
            _deadline_s.reset(token)

    def _probe(self) -> None:
        """Renders the simplest conversation. Raises SecurityError or OverflowError if that leaves the sandbox."""
        messages = [{"role": "user", "content": "hi"}]
        cases: list[list[str] | None] = [None] if self._for_tools is self._template else [None, []]
        for tools in cases:
            try:
                self._run({"messages": messages, "add_generation_prompt": True, "tools": tools})
            except (SecurityError, OverflowError):
                raise
            except Exception:  # it may reject this conversation; requests will tell
                continue


def _shielded(message: Mapping[str, Any], shield: Callable[..., str]) -> dict[str, Any]:
    """Returns a copy for the template, without fields that are None (but for the content beside tool calls, where
    templates look for it), and with reasoning under the names in use.

    An assistant's tags (`<think>`) stay in force: the model wrote them.
    """
    role, content = message.get("role"), message.get("content")
    given = {name: value for name, value in message.items() if value is not None and name != "role"}
    if isinstance(content, list):
        given["content"] = "\n".join(part["text"] for part in content)
    copy: dict[str, Any] = {"role": "system" if role == "developer" else role}
    for name, value in given.items():
        only_special = role == "assistant" and isinstance(value, str)
        copy[name] = _shield_all(value, shield, only_special=only_special)
    if copy.get("tool_calls") and "content" in message:
        copy.setdefault("content", None)
    reasoning = next((copy[name] for name in _REASONING if name in copy), None)
    return copy if reasoning is None else {"thinking": reasoning} | copy | {"reasoning_content": reasoning}


def _shield_all(value: Any, shield: Callable[..., str], **options: bool) -> Any:
    """Returns JSON data with the control tokens in all its strings broken by marks."""
    if isinstance(value, str):
        return shield(value.replace(_CONTINUE, ""), **options)
    if isinstance(value, Mapping):
        return {_shield_all(key, shield): _shield_all(item, shield) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shield_all(item, shield) for item in value]
    return value


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises InvalidRequest unless chat_template_kwargs are scalars, under names that the caller may set."""
    param = "chat_template_kwargs"
    if len(kwargs) > MAX_KWARGS:
        raise InvalidRequest(f"{len(kwargs)} values; at most {MAX_KWARGS} are allowed", param=param)
    for name, value in kwargs.items():
        shown = name[:64]
        if name in _RESERVED or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(f"{shown!r} is not a template variable that a request may set", param=param)
        if value is not None and not isinstance(value, str | int | float | bool):
            raise InvalidRequest(f"{shown!r} must be text, a number, true, false or null", param=param)
        if isinstance(value, str) and len(value) > MAX_KWARG_CHARS:
            raise InvalidRequest(f"{shown!r} is longer than {MAX_KWARG_CHARS} characters", param=param)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Besides Python's internals and changes of values, denies results and renderings that are too large or slow.

    Filters and text methods that could make large values of small ones do not exist here. Raises SecurityError.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Runs an operator, unless its result would be too large."""
        _check_time()
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise SecurityError(f"the {operator} operator is not available")
        if operator == "+":
            _check_size(sum(sizes))
        elif operator == "*":
            number = max((abs(side) for side in (left, right) if isinstance(side, int | float)), default=0)
            if number > 2**53:
                raise SecurityError("numbers too large for *")
            _check_size(sizes[0] * number if sizes else 0)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Returns whether a template may read this attribute: of strings, only those in _TEXT_METHODS."""
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        return not isinstance(obj, bytes | int | float) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Raises SecurityError; jinja2's own Undefined would fail only when used."""
        raise SecurityError(f"access to attribute {attribute[:64]!r} of {type(obj).__name__!r} is unsafe")

    def wrap_str_format(self, value: Any) -> None:
        """Returns None, so that `is_safe_attribute` decides on str.format, and denies it."""

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method; str.join and str.replace are bounded."""
        _check_time()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "join":
            return _join(args[0], owner)
        if isinstance(owner, str) and name == "replace":
            return _replace(owner, *args)
        return super().call(__context, __obj, *args, **kwargs)


class _Bounded(NodeTransformer):
    """Makes loops look at the clock in each iteration, and `a ~ b` a join, which looks at sizes."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Makes a loop look at the clock."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_timed", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """Replaces `a ~ b` by a join."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "join", [], [], None, None)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names such as `__class__`, which Python itself would look up."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have the name {str(name)[:64]!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **values: Any) -> _Namespace:
    space = _Namespace()
    for name, value in dict(*args, **values).items():
        space[name] = value
    return space


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks training targets, rendered as its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the body's nodes."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_deadline_s: ContextVar[float] = ContextVar("template_deadline_s")


def _check_time() -> None:
    if time.monotonic() > _deadline_s.get():
        raise SecurityError(f"more than {MAX_SECONDS:g} s of rendering")


def _check_size(size: float) -> None:
    if size > MAX_CHARS:
        raise SecurityError(f"a value of more than {MAX_CHARS:,} characters")


def _timed(values: Any) -> Iterator[Any]:
    for value in () if values is None else values:
        _check_time()
        yield value


def _join(values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    texts: list[str] = []
    size = 0
    for value in values:
        text = str(value if attribute is None else _ENVIRONMENT.getitem(value, attribute))
        size += len(text) + len(d)
        _check_size(size)
        texts.append(text)
    return d.join(texts)


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    _check_size(len(text) + text.count(old) * max(len(new) - len(old), 0))
    return text.replace(old, new, count)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if width > MAX_INDENT:
        raise SecurityError(f"an indent of more than {MAX_INDENT}")
    _check_size(len(text) + width * len(text.splitlines()))
    return str(jinja2.filters.do_indent(text, width, first, blank))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as transformers does: the filter of jinja2 escapes HTML. Marks stay marks."""
    if indent is not None and indent > MAX_INDENT:
        raise SecurityError(f"an indent of more than {MAX_INDENT}")
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _environment() -> _Sandbox:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    env.filters = {name: env.filters[name] for name in _FILTERS}
    env.filters |= {"tojson": _tojson, "join": _join, "replace": _replace, "indent": _indent, "_timed": _timed}
    env.globals = {
        name: env.globals[name] for name in ("range", "dict", "cycler", "joiner")
    }  # range is bounded by jinja2
    env.globals |= {
        "namespace": _namespace,
        "raise_exception": _raise_exception,
        "strftime_now": lambda layout: datetime.now().strftime(layout[:256]),
    }
    return env


_ENVIRONMENT = _environment()
