"""Runs a chat template that nobody vouches for: no access to Python's insides, bounded work, bounded memory.

Built on jinja2's ImmutableSandboxedEnvironment, which refuses attributes that begin with an underscore. On top of it:
every loop iteration draws on a budget of steps and looks at a deadline; `range`, `*`, `**`, `~`, `+` and every
function result are limited in size before they are computed; only harmless filters exist.
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

MAX_TEMPLATE_CHARS = 2 * 2**20
MAX_CHARS = 64 * 2**20  # of any string that a template makes
MAX_STEPS = 2_000_000  # loop iterations of one rendering
MAX_RANGE = 100_000
MAX_SECONDS = 5.0

# fmt: off
_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "escape", "e", "first", "float", "int", "items", "last",
    "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "safe", "select",
    "selectattr", "sort", "string", "sum", "title", "trim", "unique", "upper",
)
# fmt: on
_SIZED_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate")


class LimitExceeded(SecurityError):
    """The template asked for more work or memory than a chat template can need."""


class TemplateRefusal(jinja2.TemplateError):
    """The template itself rejects these messages, by raise_exception()."""


class _Budget:
    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise LimitExceeded(f"more than {MAX_STEPS:,} loop steps")
        if time.monotonic() > self.deadline:
            raise LimitExceeded(f"more than {MAX_SECONDS:g} s of rendering")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


def compile_template(source: str) -> Callable[[dict[str, Any]], str]:
    """A function from variables to text. Raises jinja2.TemplateError for a template that cannot be compiled."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise LimitExceeded(f"a template of {len(source):,} characters; at most {MAX_TEMPLATE_CHARS:,}")
    template = _ENVIRONMENT.from_string(source)

    def render(variables: dict[str, Any]) -> str:
        token = _budget.set(_Budget())
        parts: list[str] = []
        size = 0
        try:
            for part in template.generate(variables):
                size += len(part)
                _check_size(size)
                parts.append(part)
        finally:
            _budget.reset(token)
        return "".join(parts)

    return render


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
        for node in tree.find_all((nodes.Output, nodes.Assign, nodes.CallBlock)):
            _bound_joins(node)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute[:64]!r} of {type(obj).__name__!r} is unsafe")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if getattr(value, "__name__", "") in _SIZED_METHODS and isinstance(getattr(value, "__self__", None), str):
            raise LimitExceeded(f"the text method {value.__name__} is not available")
        return None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        name = getattr(__obj, "__name__", "")
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            _check_method(owner, name, args)
        return _checked(super().call(__context, __obj, *args, **kwargs))


def _bound_joins(node: nodes.Node) -> None:
    """`a ~ b` becomes a filter over [a, b] that looks at the size first."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            joined = nodes.Filter(nodes.List(value.nodes), "_concat", [], [], None, None)
            setattr(node, field, joined)
            _bound_joins(joined)
        elif isinstance(value, nodes.Node):
            _bound_joins(value)
        elif isinstance(value, list):
            for i, child in enumerate(value):
                if isinstance(child, nodes.Concat):
                    child = nodes.Filter(nodes.List(child.nodes), "_concat", [], [], None, None)
                    value[i] = child
                if isinstance(child, nodes.Node):
                    _bound_joins(child)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise LimitExceeded(f"a text of more than {MAX_CHARS:,} characters")


def _checked(value: Any) -> Any:
    if isinstance(value, str):
        _check_size(len(value))
    return value


def _check_binop(operator: str, left: Any, right: Any) -> None:
    _budget.get().spend()
    sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    numbers = [side for side in (left, right) if isinstance(side, int | float)]
    if operator == "+":
        _check_size(sum(sizes))
    elif operator == "%" and isinstance(left, str):
        raise LimitExceeded("the % operator on text is not available")
    elif operator == "*" and sizes and numbers:
        _check_size(int(sizes[0] * max(numbers[0], 0)))
    elif operator in ("*", "**") and any(abs(number) > 2**53 for number in numbers):
        raise LimitExceeded(f"numbers too large for {operator}")
    elif operator == "**" and len(numbers) == 2 and abs(numbers[1]) > 64:
        raise LimitExceeded("an exponent above 64")


def _check_method(owner: str | bytes, name: str, args: tuple[Any, ...]) -> None:
    if name == "replace" and len(args) >= 2:
        _check_replace(str(owner), str(args[0]), str(args[1]))
    if name == "join" and args:
        args = (list(args[0]),) if isinstance(args[0], Iterator) else args
        _check_size(len(owner) * len(args[0]) + sum(len(str(item)) for item in args[0]))


def _check_replace(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _counted(values: Any) -> Iterator[Any]:
    budget = _budget.get()
    if values is None or isinstance(values, jinja2.Undefined):
        values = values or ()
    for value in values:
        budget.spend()
        yield value


def _concat(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _join(values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = [_ENVIRONMENT.getitem(value, attribute) for value in values]
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)) + len(d) * len(texts))
    return d.join(texts)


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    _check_replace(str(text), old, new)
    return str(text).replace(old, new, count)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not 0 <= width <= 64:
        raise LimitExceeded("indent by more than 64")
    _check_size(len(text) + width * (text.count("\n") + 1))
    pad = " " * width
    lines = text.splitlines() or [""]
    padded = [lines[0], *(pad + line if line or blank else line for line in lines[1:])]
    return (pad if first else "") + "\n".join(padded)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and not 0 <= indent <= 16:
        raise LimitExceeded("tojson indents by at most 16")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _check_size(len(text))
    return text


def _range(*bounds: int) -> range:
    values = range(*bounds)
    if len(values) > MAX_RANGE:
        raise LimitExceeded(f"range({', '.join(map(str, bounds))}) is longer than {MAX_RANGE:,}")
    return values


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > 256:
        raise LimitExceeded("a date format of more than 256 characters")
    return datetime.now().strftime(layout)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    env.filters = {name: env.filters[name] for name in _FILTERS}
    env.filters |= {
        "tojson": _tojson,
        "join": _join,
        "replace": _replace,
        "indent": _indent,
        "_counted": _counted,
        "_concat": _concat,
    }
    env.globals = {
        "range": _range,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": env.globals["namespace"],
        "dict": dict,
    }
    return env


_ENVIRONMENT = _environment()
