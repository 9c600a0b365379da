"""A sandbox process that renders chat templates, which come with checkpoints and are untrusted.

    python -m moeserve.text.template_sandbox CPU_S

Each line of standard input is a JSON list: a template's source, its variables, and the date and
time for its `strftime_now`. Each line of output is a list of an outcome ("text", "syntax", "limit",
"rejects" or "fails"), and the text or the reason of the failure. If the variables are null, the
outcome is "names", and the text lists the variables that the template reads.

The Jinja environment denies access to Python's internals. A template that takes more than CPU_S
seconds or MAX_MEMORY bytes ends the process.
"""

import json
import re
import sys
from collections.abc import Generator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moeserve.text.sandbox_child import serve, set_limits

MAX_MEMORY = 2**30
MAX_CHARS = 64 * 2**20  # of one rendering
# U+FDD0 is tokenizer.MARK, whose module takes long to import.
_NOT_ASCII = re.compile("[^\0-~\ufdd0]+")


class _Sandbox(ImmutableSandboxedEnvironment):
    """An environment that raises for access to Python's internals, instead of Undefined.

    Lists have `append` and `pop`, because templates keep queues in them (Kimi-K2). The variables
    are those of one rendering.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in ("append", "pop") and type(obj) is list:
            return True
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(
            f"access to attribute {attribute[:64]!r} of {type(obj).__name__!r} is unsafe"
        )


class _Namespace(jinja2.utils.Namespace):
    """A namespace that rejects names such as `__class__`, which have a meaning in Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have the name {str(name)[:64]!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **values: Any) -> _Namespace:
    space = _Namespace()
    for name, value in dict(*args, **values).items():
        space[name] = value
    return space


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks training targets: renders its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON like transformers; jinja2's own filter escapes HTML. MARK is never escaped."""
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )
    if not ensure_ascii:
        return text
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text)


def _listed(value: Any) -> list[Any]:
    """Return the items of a filter's result, which templates of llama.cpp show as JSON."""
    if isinstance(value, Generator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _environment() -> _Sandbox:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
    env.filters["tojson"] = _tojson
    # Equal messages must give equal prompts, so there is no randomness.
    del env.filters["random"]
    del env.globals["lipsum"]
    env.globals |= {"namespace": _namespace, "raise_exception": _raise_exception}
    return env


_ENVIRONMENT = _environment()


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)


def render(source: str, variables: Mapping[str, Any] | None, now: str) -> tuple[str, str]:
    """Return the outcome, and the text or the reason of the failure."""
    try:
        if variables is None:
            return "names", " ".join(find_undeclared_variables(_ENVIRONMENT.parse(source)))
        clock = datetime.fromisoformat(now)
        functions = {"strftime_now": lambda layout: clock.strftime(layout)}
        text = _compile(source).render(functions | dict(variables))
        text.encode()  # raises for unpaired surrogates
    except MemoryError:  # `serve` ends the process
        raise
    except jinja2.TemplateSyntaxError as error:
        return "syntax", f"line {error.lineno}: {error.message}"
    except (SecurityError, OverflowError, RecursionError) as error:
        return "limit", str(error)
    except Exception as error:  # a template is a program: it may fail in any way
        if type(error) is jinja2.TemplateError:  # not a subclass: the template raised it itself
            return "rejects", str(error)
        return "fails", f"{type(error).__name__}: {error}"
    if len(text) > MAX_CHARS:
        return "limit", f"more than {MAX_CHARS:,} characters"
    return "text", text


def _answer(line: bytes) -> bytes:
    # json rather than msgspec: it reads integers of any size
    return msgspec.json.encode(render(*json.loads(line)))


if __name__ == "__main__":
    set_limits(MAX_MEMORY)
    # A file of its own: sys.stdin.buffer reads in pieces of 8 KiB.
    with open(0, "rb", buffering=2**16) as standard_input:
        serve(standard_input, _answer, cpu_s=float(sys.argv[1]))
