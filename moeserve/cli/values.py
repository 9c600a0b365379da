"""Converts what people write (25.6k, 2GiB, yes, YAML scalars) to the type of a setting."""

import math
import re
import types
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Union, get_args, get_origin

import msgspec

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
    inner, optional = strip_optional(kind)
    if value is None and optional:
        return None
    if inner is int and isinstance(value, str):
        return parse_int(value)
    form = get_origin(inner) or inner
    try:
        found = msgspec.convert(_READ[form](value) if form in _READ and isinstance(value, str) else value, kind)
        if found == "" or (form is tuple and not all(found)) or (form is float and not math.isfinite(found)):
            raise ValueError
    except (ValueError, KeyError):  # msgspec.ValidationError is one
        expected = _EXPECTED.get(form) or f"one of {', '.join(map(str, get_args(inner)))}"
        shown = repr(value)
        raise ValueError(f"expected {expected}, got {shown if len(shown) <= 64 else shown[:61] + '...'}") from None
    return found


_READ: dict[Any, Callable[[str], Any]] = {  # from text, where that is not what it means
    bool: lambda text: _BOOLS[text.lower()],
    float: float,
    tuple: lambda text: text.split(","),
}
_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text (in quotes, if YAML reads it otherwise)",
    tuple: "a list of words",
}
