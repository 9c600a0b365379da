"""A process that renders chat templates, which come with checkpoints and so may be anybody's code.

    python -m moeserve.text.template_sandbox CPU_S

Reads JSON lines on standard input, each a template's source and its variables; answers each with a
line: a list of what became of it ("text", "syntax", "limit", "rejects" or "fails") and the text, or
why there is none; where null stands for the variables, "names" and those that the template reads.
The environment keeps templates from Python's internals; what takes more than CPU_S seconds or
MAX_MEMORY ends the process.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Mapping
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

MAX_MEMORY = 2**30
MAX_CHARS = 64 * 2**20  # of one rendering
_NOT_ASCII = re.compile(
    "[^\0-~\ufdd0]+"
)  # U+FDD0: tokenizer.MARK, whose module takes long to import


class _Sandbox(ImmutableSandboxedEnvironment):
    """Denies Python's internals and changes of values, with an error where jinja2 would go on with
    an Undefined.
    """

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Raises SecurityError; jinja2's own Undefined would fail only when used."""
        raise SecurityError(
            f"access to attribute {attribute[:64]!r} of {type(obj).__name__!r} is unsafe"
        )


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


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as transformers does: the filter of jinja2 escapes HTML. Marks stay marks."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _environment() -> _Sandbox:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    env.filters["tojson"] = _tojson
    del env.filters["random"], env.globals["lipsum"]  # the same messages are the same prompt
    env.globals |= {
        "namespace": _namespace,
        "raise_exception": _raise_exception,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
    }
    return env


_ENVIRONMENT = _environment()


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)


def render(source: str, variables: Mapping[str, Any] | None) -> tuple[str, str]:
    """Returns what became of a template, and its text or why there is none."""
    try:
        if variables is None:
            return "names", " ".join(find_undeclared_variables(_ENVIRONMENT.parse(source)))
        text = _compile(source).render(variables)
        text.encode()  # unpaired surrogates are no text
        return (
            ("text", text)
            if len(text) <= MAX_CHARS
            else ("limit", f"more than {MAX_CHARS:,} characters")
        )
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        return "syntax", f"line {error.lineno}: {error.message}"
    except (SecurityError, OverflowError, RecursionError) as error:
        return "limit", str(error)
    except Exception as error:  # a template is a program: it may fail in any way on these messages
        return (
            ("rejects", str(error))
            if type(error) is jinja2.TemplateError
            else ("fails", type(error).__name__)
        )


def serve(cpu_s: float) -> None:
    """Answers until standard input ends."""
    out = sys.stdout.buffer
    for line in open(0, "rb", buffering=2**16):  # noqa: SIM115
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # nobody catches SIGPROF: it ends the process
        answer = msgspec.json.encode(render(*json.loads(line)))  # json: integers may have any size
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(answer + b"\n")
        out.flush()


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the server, which then closes our standard input
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(float(sys.argv[1]))
