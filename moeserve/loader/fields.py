"""Typed access to a JSON object, with errors that name file, key, value and remedy."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError

_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object, such as config.json or a section of it.

    A key with the value null is not absent: its default does not apply, and only the optional
    reads accept it.
    """

    path: Path
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]  # for absent keys
    prefix: str = ""  # put before keys in errors, such as "rope_parameters."

    def raw(self, key: str) -> Any:
        """Return the value or its default, unchecked."""
        if key in self.values:
            return self.values[key]
        if key in self.defaults:
            return self.defaults[key]
        raise CheckpointError(f"{self.path}: {self.prefix}{key} is missing")

    def error(self, key: str, must: str) -> CheckpointError:
        """Return the error for a wrong value, "KEY is VALUE; `must`"."""
        shown = repr(self.raw(key))
        if len(shown) > _MAX_SHOWN:
            shown = shown[:_MAX_SHOWN] + "..."
        return CheckpointError(f"{self.path}: {self.prefix}{key} is {shown}; {must}")

    def integer(self, key: str, low: int, high: int) -> int:
        """Read an integer in [low, high]."""
        value = self.raw(key)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise self.error(key, f"it must be an integer from {low} to {high}")

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """Read an integer in [low, high], or null."""
        return None if self.raw(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float) -> float:
        """Read a number in [low, high] other than 0. No key that is read here may be 0."""
        value = self.raw(key)
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and low <= value <= high
            and value
        ):
            return float(value)
        bracket = "(" if low == 0 else "["
        raise self.error(key, f"it must be a number other than 0 in {bracket}{low:g}, {high:g}]")

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """Read a number as `number` does, or null."""
        return None if self.raw(key) is None else self.number(key, low, high)

    def boolean(self, key: str) -> bool:
        """Read true or false. Null is false, as in transformers, which tests for truthiness."""
        value = self.raw(key)
        if isinstance(value, bool) or value is None:
            return bool(value)
        raise self.error(key, "it must be true or false")

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Read one of the strings `choices`."""
        value = self.raw(key)
        if isinstance(value, str) and value in choices:
            return value
        raise self.error(key, f"supported: {', '.join(choices)}")

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Read a list of integers in [low, high], or null for none."""
        value = self.raw(key)
        if value is None:
            return ()
        if isinstance(value, list) and all(
            type(item) is int and low <= item <= high for item in value
        ):
            return tuple(value)
        raise self.error(key, f"it must be a list of integers from {low} to {high}")

    def section(self, key: str) -> dict[str, Any]:
        """Read a nested object; {} for null."""
        value = self.raw(key)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        raise self.error(key, "it must be an object or null")

    def only(self, **known: Any) -> None:
        """Raise unless each of these keys is absent, null, or has the only supported value."""
        for key, value in known.items():
            if self.values.get(key) not in (None, value):
                raise self.error(key, f"only {value!r} is supported")

    def unsupported(self, key: str, remedy: str) -> None:
        """Raise if the key is present and not null: ignoring it would change the results."""
        if self.values.get(key) is not None:
            raise self.error(key, remedy)
