"""Parameters of a URL's query."""

from __future__ import annotations

from collections.abc import Mapping

from moeserve.errors import InvalidRequest
from moeserve.server.errors import shorten

_SWITCHES = {"true": True, "1": True, "": True, "false": False, "0": False}


def number(query: Mapping[str, str], name: str, default: float, low: float, high: float) -> float:
    """Raises InvalidRequest for anything but a number from low to high."""
    given = query.get(name)
    if given is None:
        return default
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, not {shorten(given)!r}", param=name)
    return value


def switch(query: Mapping[str, str], name: str, default: bool) -> bool:
    """Raises InvalidRequest for anything but true and false."""
    given = query.get(name)
    if given is None:
        return default
    if given.lower() not in _SWITCHES:
        raise InvalidRequest(f"{name} must be true or false, not {shorten(given)!r}", param=name)
    return _SWITCHES[given.lower()]
