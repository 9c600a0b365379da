"""Renders chat templates, which come with checkpoints and so may be anybody's code.

jinja2's ImmutableSandboxedEnvironment denies access to Python's internals and changes of the caller's values. Beyond
that, every loop iteration, call and operation checks a deadline, and operations that make texts, lists and
ranges check their size first. Filters and text methods that could make large values of small ones do not exist here.
A rendering that asks for more raises LimitExceeded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 2 * 2**20
MAX_CHARS = 64 * 2**20  # of any text that a template makes
MAX_RANGE = 100_000
MAX_SECONDS = 5.0  # of one rendering
MAX_INDENT = 64

# fmt: off
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


class LimitExceeded(SecurityError):
    """The template asked for more work or memory than a chat template can need."""


class TemplateRefusal(jinja2.TemplateError):
    """The template itself rejects these messages, by raise_exception()."""


_deadline_s: ContextVar[float] = ContextVar("template_deadline_s")


def compile_template(source: str) -> Callable[[dict[str, Any]], str]:
    """Returns a function from variables to text. Raises jinja2.TemplateError if the template does not compile."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise LimitExceeded(f"a template of {len(source):,} characters; at most {MAX_TEMPLATE_CHARS:,}")
    template = _ENVIRONMENT.from_string(source)

    def render(variables: dict[str, Any]) -> str:
        """Returns the rendered text. Raises LimitExceeded."""
        token = _deadline_s.set(time.monotonic() + MAX_SECONDS)
        try:
            return _join(template.generate(variables))
        finally:
            _deadline_s.reset(token)

    return render


class _Bounded(NodeTransformer):
    """Makes loops count their iterations, and `a ~ b` a join, which looks at sizes."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Counts the loop's iterations."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """Replaces `a ~ b` by a join."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "join", [], [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Runs an operator, unless its result would be too large."""
        _check_time()
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        numbers = [abs(side) for side in (left, right) if isinstance(side, int | float)]
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise LimitExceeded(f"the {operator} operator is not available")
        if operator == "+":
            _check_size(sum(sizes))
        elif operator == "*" and any(number > 2**53 for number in numbers):
            raise LimitExceeded("numbers too large for *")
        elif operator == "*" and sizes:
            _check_size(int(sizes[0] * max(numbers, default=0)))
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

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method; str.join and str.replace are bounded."""
        _check_time()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "join":
            return _join(args[0], owner)
        if isinstance(owner, str) and name == "replace":
            return _replace(owner, *args)
        return super().call(__context, __obj, *args, **kwargs)


def _check_time() -> None:
    if time.monotonic() > _deadline_s.get():
        raise LimitExceeded(f"more than {MAX_SECONDS:g} s of rendering")


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise LimitExceeded(f"a text of more than {MAX_CHARS:,} characters")


def _check_indent(width: Any) -> None:
    if isinstance(width, int) and width > MAX_INDENT:
        raise LimitExceeded(f"an indent of more than {MAX_INDENT}")


def _counted(values: Any) -> Iterator[Any]:
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
    _check_indent(width)
    _check_size(len(text) + width * (text.count("\n") + 1))
    return str(jinja2.filters.do_indent(text, int(width), first, blank))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Returns JSON as transformers does: the filter of jinja2 escapes HTML."""
    _check_indent(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _range(*bounds: int) -> range:
    values = range(*bounds)
    if len(values) > MAX_RANGE:
        raise LimitExceeded(f"range({', '.join(map(str, bounds))}) is longer than {MAX_RANGE:,}")
    return values


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout[:256])


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks training targets, rendered as its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the body's nodes."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    env.filters = {name: env.filters[name] for name in _FILTERS}
    env.filters |= {"tojson": _tojson, "join": _join, "replace": _replace, "indent": _indent, "_counted": _counted}
    env.globals = {
        "range": _range,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": env.globals["namespace"],
        "dict": dict,
    }
    return env


_ENVIRONMENT = _environment()
