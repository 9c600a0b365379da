"""Validates values by a JSON schema, conservatively: patterns and formats are not evaluated."""

from collections.abc import Callable, Mapping
from typing import Any

from moeserve.text.json_schema import GrammarFault
from moeserve.text.schema_alternatives import Alternative, alternatives, is_listed, kind_of

MAX_VALUES = 5_000  # values to check in one call


def is_valid(value: Any, schema: Any, root: Any) -> bool:
    """Return whether a value certainly satisfies a schema; False if it is not certain.

    root: the whole schema, in which references are followed.
    """
    try:
        return _Validator(root).check(value, schema)
    except (GrammarFault, TypeError, AttributeError, RecursionError):
        # TypeError, AttributeError: a keyword with a value of the wrong type
        return False


class _Validator:
    """Validates values by the schemas inside `root`, in a bounded number of steps."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_checked = 0

    def check(self, value: Any, schema: Any) -> bool:
        """Return whether a value certainly satisfies a schema."""
        self._num_checked += 1
        if self._num_checked > MAX_VALUES:
            return False
        return any(
            self._fits(value, alternative) for alternative in alternatives(schema, self._root)
        )

    def _fits(self, value: Any, alternative: Alternative) -> bool:
        kind = kind_of(value)
        if alternative.kind not in ("any", kind) and (alternative.kind, kind) != (
            "number",
            "integer",
        ):
            return False
        for key, limit in alternative.schema.items():
            if (condition := _CONDITIONS.get(key)) is not None:
                if not condition(value, limit):
                    return False
            elif (parts_of := _VALUE_PARTS.get(key)) is not None:
                if not all(self.check(*part) for part in parts_of(value, alternative.schema)):
                    return False
            else:
                return False  # the keyword cannot be evaluated, so nothing is certain
        return True


_CONDITIONS: dict[str, Callable[[Any, Any], bool]] = {
    "enum": is_listed,
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "multipleOf": lambda value, limit: (
        isinstance(value, int) and isinstance(limit, int) and limit > 0 and value % limit == 0
    ),
    "required": lambda value, names: all(name in value for name in names),
    **dict.fromkeys(
        ("minLength", "minItems", "minProperties"), lambda value, limit: len(value) >= limit
    ),
    **dict.fromkeys(
        ("maxLength", "maxItems", "maxProperties"), lambda value, limit: len(value) <= limit
    ),
}


def _members(value: Any, schema: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(value[key], inner) for key, inner in schema["properties"].items() if key in value]


def _others(value: Any, schema: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    named = schema.get("properties", {})
    return [(value[key], schema["additionalProperties"]) for key in value if key not in named]


def _items(value: Any, schema: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(item, schema["items"]) for item in value[len(schema.get("prefixItems", ())) :]]


def _first_items(value: Any, schema: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return list(zip(value, schema["prefixItems"], strict=False))


# Keyword -> function that returns the parts of a value, each with its schema. `patternProperties`
# is missing, so a schema with it is never certain.
_VALUE_PARTS: dict[str, Callable[[Any, Mapping[str, Any]], list[tuple[Any, Any]]]] = {
    "properties": _members,
    "additionalProperties": _others,
    "items": _items,
    "prefixItems": _first_items,
}
