"""Converts what people write (25.6k, 2GiB, yes, YAML scalars) to the type of a setting."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from typing import Any, Literal, Union, get_args, get_origin

_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def parse_int(text: str) -> int:
    """Reads a whole number: 4096, 1_000, 25.6k (decimal: k m g t), 4K (binary: K M G T, KiB, ...; kB, MB decimal).

    Raises ValueError with an example if `text` is no such number or has a fraction left.
    """
    match = re.fullmatch(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmgtKMGT]?)(i?B?)", text.strip())
    if match is None:
        raise ValueError(f"expected a whole number such as 4096, 25.6k or 2GiB, got {text!r}")
    digits, unit, suffix = match.groups()
    base = 1024 if suffix.startswith("i") or (unit.isupper() and not suffix) else 1000
    scale: int = base ** " kmgt".index(unit.lower() or " ")
    number = Fraction(digits.replace("_", "")) * scale
    if number.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return number.numerator


def strip_optional(kind: Any) -> tuple[Any, bool]:
    """Splits a type: int | None -> (int, True); int -> (int, False)."""
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (k for k in get_args(kind) if k is not type(None))
        return inner, True
    return kind, False


def convert(kind: Any, value: Any) -> Any:
    """Returns `value` (text from a flag or variable, or a YAML value) as `kind`. ValueError says what was expected."""
    kind, optional = strip_optional(kind)
    if value is None and optional:
        return None
    if get_origin(kind) is Literal:
        expected, found = f"one of {', '.join(map(str, get_args(kind)))}", value if value in get_args(kind) else None
    elif get_origin(kind) is tuple:
        expected, found = "a list of words", _words(value)
    else:
        expected, read = _SCALARS[kind]
        found = read(value)
    if found is None:
        shown = repr(value)
        raise ValueError(f"expected {expected}, got {shown if len(shown) <= 64 else shown[:61] + '...'}")
    return found


def _words(value: Any) -> tuple[str, ...] | None:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(parts) if isinstance(parts, list) and all(isinstance(p, str) and p for p in parts) else None


def _bool(value: Any) -> bool | None:
    return _BOOLS.get(value.lower()) if isinstance(value, str) else value if isinstance(value, bool) else None


def _int(value: Any) -> int | None:
    if isinstance(value, str):
        return parse_int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: Any) -> float | None:
    with suppress(ValueError):
        if isinstance(value, str | int | float) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    return None


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


_SCALARS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    bool: ("true or false", _bool),
    int: ("a whole number", _int),
    float: ("a number", _float),
    str: ("a text (in quotes, if YAML reads it otherwise)", _str),
}
