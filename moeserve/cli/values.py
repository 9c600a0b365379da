"""Converts what people write (25.6k, 2GiB, yes, YAML scalars) to the type of a setting."""

from __future__ import annotations

import math
import re
import types
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_int(text: str) -> int:
    """Reads a whole number: 4096, 1_000, 25.6k (decimal: k m g t), 4K (binary: K M G T, KiB, ...; kB, MB decimal).

    Raises ValueError with an example if `text` is no such number or has a fraction left.
    """
    match = re.fullmatch(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmgtKMGT]?)(i?B?)", text.strip())
    if match is None:
        raise ValueError(f"expected a whole number such as 4096, 25.6k or 2GiB, got {text!r}")
    digits, unit, suffix = match[1].replace("_", ""), match[2], match[3]
    if suffix.startswith("i"):
        scale = _BINARY.get(unit.upper(), 1)
    elif suffix == "B":
        scale = _DECIMAL[unit.lower()]
    else:
        scale = _BINARY.get(unit) or _DECIMAL[unit]
    whole, _, fraction = digits.partition(".")
    number, remainder = divmod(int(whole + fraction) * scale, int(10 ** len(fraction)))
    if remainder:
        raise ValueError(f"{text!r} is not a whole number")
    return number


def strip_optional(kind: Any) -> tuple[Any, bool]:
    """Splits a type: int | None -> (int, True); int -> (int, False)."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = [k for k in get_args(kind) if k is not type(None)]
        assert len(inner) == 1, kind
        return inner[0], True
    return kind, False


def convert(kind: Any, value: Any) -> Any:
    """Returns `value` (text from a flag or variable, or a YAML value) as `kind`. ValueError says what was expected."""
    kind, optional = strip_optional(kind)
    if value is None:
        if optional:
            return None
        raise ValueError("a value is missing")
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise _unexpected(f"one of {', '.join(map(str, get_args(kind)))}", value)
    if get_origin(kind) is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, list | tuple) and all(isinstance(p, str) and p for p in parts):
            return tuple(parts)
        raise _unexpected("a list of words", value)
    return _SCALARS[kind](value)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise _unexpected("true or false", value)


def _int(value: Any) -> int:
    if isinstance(value, str):
        return parse_int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _unexpected("a whole number", value)


def _float(value: Any) -> float:
    with suppress(ValueError):
        if isinstance(value, str | int | float) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    raise _unexpected("a number", value)


def _str(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise _unexpected("a text (in quotes, if YAML reads it otherwise)", value)


_SCALARS: dict[Any, Any] = {bool: _bool, int: _int, float: _float, str: _str}


def _unexpected(what: str, value: Any) -> ValueError:
    shown = repr(value)
    return ValueError(f"expected {what}, got {shown if len(shown) <= 64 else shown[:61] + '...'}")
