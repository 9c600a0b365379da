"""Many kinds of small JSON schemas for random generation, by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any


def closed(optional: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    """Return an object with exactly these properties, all required but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


STRING, INTEGER, NUMBER, BOOLEAN = (
    {"type": name} for name in ("string", "integer", "number", "boolean")
)
NODE = closed(
    value=STRING, children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
)
EXPRESSION = {"anyOf": [INTEGER, closed(op={"enum": ["+", "*"]}, of={"$ref": "#/$defs/e"})]}
LIST = {"anyOf": [{"type": "null"}, closed(head=BOOLEAN, tail={"$ref": "#/$defs/list"})]}
DOG, CAT = (
    closed(kind={"const": "dog"}, barks=BOOLEAN),
    closed(kind={"const": "cat"}, lives=INTEGER),
)

SCHEMAS: dict[str, Any] = {
    "anything": {},
    "true": True,
    "null": {"type": "null"},
    "boolean": BOOLEAN,
    "integer": INTEGER,
    "number": NUMBER,
    "string": STRING,
    "any object": {"type": "object"},
    "any array": {"type": "array"},
    "several types": {"type": ["string", "null", "integer"]},
    "person": closed(name=STRING, age=INTEGER),
    "optional": closed(("b", "c"), a=INTEGER, b=STRING, c=BOOLEAN),
    "only optional": closed(("a", "b", "c"), a=INTEGER, b=STRING, c=BOOLEAN),
    "open object": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
    "additional of a type": {
        "type": "object",
        "properties": {"a": BOOLEAN},
        "additionalProperties": INTEGER,
    },
    "map": {"type": "object", "additionalProperties": {"type": "array", "items": BOOLEAN}},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": INTEGER},
        "additionalProperties": False,
    },
    "required and unnamed": {"type": "object", "required": ["z"], "additionalProperties": NUMBER},
    "one property or more": {"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
    "two properties": {
        "type": "object",
        "properties": {"a": INTEGER},
        "required": ["a"],
        "minProperties": 2,
    },
    "few properties": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
    "empty object": closed(),
    "names with signs": closed(
        **dict.fromkeys(["a b", 'q"q', "back\\slash", "snow☃", ""], INTEGER)
    ),
    "nested": closed(a=closed(b=closed(c=closed(d=INTEGER)))),
    "array": {"type": "array", "items": INTEGER},
    "bounded array": {"type": "array", "items": BOOLEAN, "minItems": 2, "maxItems": 4},
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {
        "type": "array",
        "prefixItems": [INTEGER, STRING, BOOLEAN],
        "items": False,
        "minItems": 3,
    },
    "tuple and more": {"type": "array", "prefixItems": [STRING], "items": INTEGER, "minItems": 2},
    "arrays of arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "array", "items": INTEGER}},
    },
    "array of objects": {
        "type": "array",
        "items": closed(x=NUMBER, y=NUMBER),
        "minItems": 1,
        "maxItems": 3,
    },
    "enum": {"enum": ["red", "green", "blue"]},
    "enum of all types": {"enum": [1, "1", None, True, [1, {"a": 2}], {"b": []}, 1.5]},
    "enum of 500": closed(code={"enum": [f"value number {i}" for i in range(500)]}),
    "enum of numbers": {"type": "integer", "enum": list(range(0, 900, 9))},
    "enum with common beginnings": {"enum": ["a" * i for i in range(1, 20)]},
    "unicode enum": {"enum": ["über", "漢字", "😀😀", "мир", 'quo"te', "tab\t", "nul\u0000"]},
    "const": {"const": {"a": [1, 2.5, "x"], "b": None}},
    "string lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "long string": {"type": "string", "maxLength": 100_000},
    "exact length": {"type": "string", "minLength": 5, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "unanchored pattern": {"type": "string", "pattern": "[12]-?[12]"},
    "unicode pattern": {"type": "string", "pattern": "^[äöü漢]{2,4}$"},
    "pattern and length": {"type": "string", "pattern": "^[ab]*$", "minLength": 2, "maxLength": 5},
    "date-time": {"type": "string", "format": "date-time"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "email": {"type": "string", "format": "email"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "range": {"type": "integer", "minimum": -5, "maximum": 117},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "at least": {"type": "integer", "minimum": 1000},
    "negative": {"type": "integer", "maximum": -1},
    "number range": {"type": "number", "minimum": 0, "maximum": 1},
    "fractions": {"type": "number", "minimum": -0.25, "exclusiveMaximum": 12.75},
    "multiples": {"type": "integer", "multipleOf": 7},
    "any of": {"anyOf": [STRING, INTEGER, closed(a=BOOLEAN)]},
    "one of": {"oneOf": [DOG, CAT]},
    "discriminated": closed(pet={"oneOf": [DOG, CAT], "discriminator": {"propertyName": "kind"}}),
    "nullable": closed(a={"anyOf": [closed(b=INTEGER), {"type": "null"}]}),
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"b": STRING}, "required": ["b"]},
        ]
    },
    "reference": closed(a={"$ref": "#/$defs/x"})
    | {"$defs": {"x": {"type": "integer", "minimum": 3}}},
    "reference to definitions": {"$ref": "#/definitions/x", "definitions": {"x": closed(a=STRING)}},
    "reference and title": closed(a={"$ref": "#/$defs/x", "title": "A", "description": "d"})
    | {"$defs": {"x": BOOLEAN}},
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "expression": {"$ref": "#/$defs/e", "$defs": {"e": EXPRESSION}},
    "linked list": {"$ref": "#/$defs/list", "$defs": {"list": LIST}},
    "reference to the root": closed(("next",), n=INTEGER, next={"$ref": "#"}),
    "mutual": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": closed(("b",), b={"$ref": "#/$defs/b"}),
            "b": closed(("a",), a={"$ref": "#/$defs/a"}),
        },
    },
    "tool calls": {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {
            "anyOf": [
                closed(
                    name={"const": f"tool_{i}"},
                    arguments=closed(("limit",), query=STRING, limit=INTEGER),
                )
                for i in range(8)
            ]
        },
    },
    "annotations": {
        "title": "T",
        "description": "d",
        "examples": [{"$ref": "http://x"}],
        "default": 3,
        "$comment": "c",
        "type": "integer",
    },
}


# ---- many schemas whose answers are bounded
# -----------------------------------------------------------------

LETTERS = "aeinorstäöüßмирこん漢字😀"
PATTERNS = (
    "^[A-Z]{2}-[0-9]{3,5}$",
    "^(ab|cd){1,4}$",
    "^[äöü漢]{2,4}$",
    "^[^\"\\\\a-z]{1,4}$",
    "^\\d{4}-\\d\\d$",
    "^x(y|z)?x$",
)  # fmt: skip
FORMATS = ("date", "ipv4", "uuid")


def generated(count: int = 200) -> list[dict[str, Any]]:
    """Return `count` schemas of many kinds, the same on every call.

    Every answer ends within a few hundred tokens.
    """
    return [_schema(random.Random(i), _ROOTS[i % len(_ROOTS)]) for i in range(count)]


def _schema(rng: random.Random, root: Callable[[random.Random], dict[str, Any]]) -> dict[str, Any]:
    return root(rng) | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": _name(rng),
    }


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(1, 6)))


def _leaf(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(-99, 99)
    length = rng.randint(0, 6)
    return rng.choice(
        [
            {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 5000)},
            {
                "type": "integer",
                "exclusiveMinimum": least,
                "exclusiveMaximum": least + rng.randint(2, 40),
            },
            {"type": "string", "minLength": length, "maxLength": length + rng.randint(0, 6)},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
            {
                "enum": [_name(rng) for _ in range(rng.randint(1, 9))]
                + [1.5, None, [_name(rng)]][: rng.randint(0, 3)]
            },
            {"const": {_name(rng): [rng.randint(-999, 999) / 64, _name(rng), True]}},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
        ]
    )


def _object(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    names = list(dict.fromkeys(_name(rng) for _ in range(rng.randint(1, 4))))
    optional = tuple(name for name in names if rng.random() < 0.3)
    return closed(optional, **{name: _any(rng, depth - 1) for name in names})


def _array(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _tuple(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    items = [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 4))]}


def _tagged(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = [
        closed(kind={"const": f"{_name(rng)}{i}"}, of=_any(rng, depth - 1))
        for i in range(rng.randint(2, 4))
    ]
    return {"oneOf": kinds}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth <= 0 or rng.random() < 0.4:
        return _leaf(rng)
    return rng.choice([_object, _array, _tuple, _union, _tagged])(rng, depth)


def _enum_of_500(rng: random.Random) -> dict[str, Any]:
    return closed(
        code={"enum": [f"{_name(rng)} {i}" for i in range(500)]},
        of={"enum": list(range(0, 1500, 3))},
    )


def _references(rng: random.Random) -> dict[str, Any]:
    names = [f"d{i}/~" for i in range(rng.randint(2, 4))]
    uses = {f"u{i}": {"$ref": f"#/$defs/d{rng.randrange(len(names))}~1~0"} for i in range(3)}
    return closed(**uses) | {"$defs": {name: _any(rng, 1) for name in names}}


def _chain(rng: random.Random) -> dict[str, Any]:
    """Return a recursive schema: a list that may end at each element."""
    node = closed(value=_leaf(rng), next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _tree(rng: random.Random) -> dict[str, Any]:
    """Return a recursive schema: a binary tree of at most three levels."""
    levels = {
        f"t{i}": closed(("l", "r"), v=_leaf(rng), l=_ref(i + 1), r=_ref(i + 1)) for i in range(2)
    }
    return _ref(0) | {"$defs": levels | {"t2": _leaf(rng)}}


def _ref(level: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/t{level}"}


def _mutual(rng: random.Random) -> dict[str, Any]:
    ends = {"anyOf": [_leaf(rng), {"$ref": "#/$defs/b"}]}
    again = {"anyOf": [_leaf(rng), {"$ref": "#/$defs/a"}]}
    return {"$ref": "#/$defs/a", "$defs": {"a": closed(to_b=ends), "b": closed(to_a=again)}}


def _all_of(rng: random.Random) -> dict[str, Any]:
    parts = [
        {"type": "object", "properties": {name: _leaf(rng)}, "required": [name]} for name in "ab"
    ]
    return {"allOf": [*parts, {"additionalProperties": False, "properties": {"a": {}, "b": {}}}]}


_ROOTS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    _object,
    _array,
    _tuple,
    _union,
    _tagged,
    _enum_of_500,
    _references,
    _chain,
    _tree,
    _mutual,
    _leaf,
    _all_of,
)
