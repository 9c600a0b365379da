"""JSON schemas of many kinds, small and fit for random generation: name -> schema."""

from __future__ import annotations

from typing import Any


def closed(optional: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object with exactly these properties, all required but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
NODE = closed(value=STRING, children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2})
EXPRESSION = {"anyOf": [INTEGER, closed(op={"enum": ["+", "*"]}, of={"$ref": "#/$defs/e"})]}
LIST = {"anyOf": [{"type": "null"}, closed(head=BOOLEAN, tail={"$ref": "#/$defs/list"})]}
DOG, CAT = closed(kind={"const": "dog"}, barks=BOOLEAN), closed(kind={"const": "cat"}, lives=INTEGER)

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
    "additional of a type": {"type": "object", "properties": {"a": BOOLEAN}, "additionalProperties": INTEGER},
    "map": {"type": "object", "additionalProperties": {"type": "array", "items": BOOLEAN}},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": INTEGER},
        "additionalProperties": False,
    },
    "required and unnamed": {"type": "object", "required": ["z"], "additionalProperties": NUMBER},
    "one property or more": {"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
    "two properties": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "minProperties": 2},
    "few properties": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
    "empty object": closed(),
    "names with signs": closed(**dict.fromkeys(["a b", 'q"q', "back\\slash", "snow☃", ""], INTEGER)),
    "nested": closed(a=closed(b=closed(c=closed(d=INTEGER)))),
    "array": {"type": "array", "items": INTEGER},
    "bounded array": {"type": "array", "items": BOOLEAN, "minItems": 2, "maxItems": 4},
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [INTEGER, STRING, BOOLEAN], "items": False, "minItems": 3},
    "tuple and more": {"type": "array", "prefixItems": [STRING], "items": INTEGER, "minItems": 2},
    "arrays of arrays": {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": INTEGER}}},
    "array of objects": {"type": "array", "items": closed(x=NUMBER, y=NUMBER), "minItems": 1, "maxItems": 3},
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
    "reference": closed(a={"$ref": "#/$defs/x"}) | {"$defs": {"x": {"type": "integer", "minimum": 3}}},
    "reference to definitions": {"$ref": "#/definitions/x", "definitions": {"x": closed(a=STRING)}},
    "reference and title": closed(a={"$ref": "#/$defs/x", "title": "A", "description": "d"})
    | {"$defs": {"x": BOOLEAN}},
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "expression": {"$ref": "#/$defs/e", "$defs": {"e": EXPRESSION}},
    "linked list": {"$ref": "#/$defs/list", "$defs": {"list": LIST}},
    "reference to the root": closed(("next",), n=INTEGER, next={"$ref": "#"}),
    "mutual": {
        "$ref": "#/$defs/a",
        "$defs": {"a": closed(("b",), b={"$ref": "#/$defs/b"}), "b": closed(("a",), a={"$ref": "#/$defs/a"})},
    },
    "tool calls": {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {
            "anyOf": [
                closed(name={"const": f"tool_{i}"}, arguments=closed(("limit",), query=STRING, limit=INTEGER))
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
