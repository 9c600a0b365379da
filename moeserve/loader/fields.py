"""Typed, bounded access to the values of one JSON object, with errors that name file, key, value and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError

_MAX_SHOWN = 80


class Fields:
    """One JSON object, with defaults for absent keys.

    An explicit null counts as null, not as absent; only the optional reads accept it.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._defaults = defaults
        self._prefix = prefix

    def raw(self, key: str) -> Any:
        """Returns the value or its default, unchecked."""
        if key in self.values:
            return self.values[key]
        if key in self._defaults:
            return self._defaults[key]
        raise CheckpointError(f"{self.path}: {self._prefix}{key} is missing")

    def error(self, key: str, must: str) -> CheckpointError:
        """Returns the error for a bad value; `must` goes on after "key is value; "."""
        shown = repr(self.raw(key))
        if len(shown) > _MAX_SHOWN:
            shown = shown[:_MAX_SHOWN] + "..."
        return CheckpointError(f"{self.path}: {self._prefix}{key} is {shown}; {must}")

    def integer(self, key: str, low: int, high: int) -> int:
        """Reads an integer in [low, high]."""
        value = self.raw(key)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise self.error(key, f"it must be an integer from {low} to {high}")

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """Reads an integer in [low, high], or null."""
        return None if self.raw(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float) -> float:
        """Reads a finite number in [low, high]; with low 0 in (0, high], because a zero here always means damage."""
        value = self.raw(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high and value:
            return float(value)
        bracket = "(" if low == 0 else "["
        raise self.error(key, f"it must be a number other than 0 in {bracket}{low:g}, {high:g}]")

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """Reads a number as `number` does, or null."""
        return None if self.raw(key) is None else self.number(key, low, high)

    def boolean(self, key: str) -> bool:
        """Reads true or false."""
        value = self.raw(key)
        if isinstance(value, bool):
            return value
        raise self.error(key, "it must be true or false")

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Reads one of the strings `choices`."""
        value = self.raw(key)
        if isinstance(value, str) and value in choices:
            return value
        raise self.error(key, f"supported: {', '.join(choices)}")

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Reads a list of integers in [low, high], or null for none."""
        value = self.raw(key)
        if value is None:
            return ()
        if isinstance(value, list) and all(type(item) is int and low <= item <= high for item in value):
            return tuple(value)
        raise self.error(key, f"it must be a list of integers from {low} to {high}")

    def section(self, key: str) -> dict[str, Any]:
        """Reads a nested object; empty for null."""
        value = self.raw(key)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        raise self.error(key, "it must be an object or null")

    def unsupported(self, key: str, remedy: str) -> None:
        """Refuses a key that would change the model's result if it were ignored."""
        if self.values.get(key) is not None:
            raise self.error(key, remedy)
