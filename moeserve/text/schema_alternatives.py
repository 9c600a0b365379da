"""Resolves a JSON schema to a list of alternatives, one per JSON type.

Answer formats with values between tags, or with bare keys, have their own grammars and readers. So
they need to know which keys an object has, and which texts a value may be. A schema can express
this in many ways ($ref, allOf, anyOf, enum, lists of types), an `Alternative` in one: it has no
references and no unions.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple
from urllib.parse import unquote

from moeserve.text.json_schema import ANNOTATIONS, GrammarFault, pointer

MAX_ALTERNATIVES = 64
MAX_RESOLVED_SCHEMAS = 2_000  # schemas that are resolved for one list of alternatives
KINDS = ("string", "number", "integer", "boolean", "null", "array", "object")
_NUMBER_KEYWORDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_KEYWORDS_BY_KIND = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": _NUMBER_KEYWORDS,
    "integer": _NUMBER_KEYWORDS,
    "array": {
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems",
        "contains", "minContains", "maxContains", "unevaluatedItems",
    },
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
        "unevaluatedProperties",
    },
}  # fmt: skip
# Keywords that restrict values of several kinds, and are not resolved here
_KEYWORDS_OF_ALL_KINDS = {"not", "if", "then", "else", "$dynamicRef", "$recursiveRef"}
_RESTRICTING_KEYWORDS = _KEYWORDS_OF_ALL_KINDS.union(*_KEYWORDS_BY_KIND.values())
_RESOLVED_KEYWORDS = {"$ref", "allOf", "anyOf", "oneOf", "$defs", "definitions"}


class Alternative(NamedTuple):
    """One way to satisfy a schema."""

    kind: str  # one of KINDS, or "any" for an unrestricted value
    schema: dict[str, Any]  # the keywords that restrict values of this kind; enum lists the values
    where: str  # JSON pointer to the schema, for errors


def alternatives(schema: Any, root: Any, where: str = "") -> list[Alternative]:
    """Return the alternatives of a checked schema, [] if no value satisfies it.

    Args:
        schema: The schema.
        root: The whole schema, in which references are followed.
        where: The pointer to `schema`.

    Raise GrammarFault for references to other documents, circular references, unions that cannot be
    resolved, and values that are not a schema.
    """
    result: list[Alternative] = []
    try:
        for merged in _Resolver(root).resolve(schema, where, ()):
            result += _split_by_kind(merged, where)
    except (TypeError, AttributeError) as error:  # a keyword with a value of the wrong type
        raise GrammarFault(f"not a JSON schema: {error}", where) from error
    return result


def kinds_of(schema: Any, root: Any) -> set[str]:
    """Return the kinds of values that a schema allows; {"any"} if it cannot be resolved."""
    try:
        return {alternative.kind for alternative in alternatives(schema, root)}
    except GrammarFault:
        return {"any"}


def members_of(schema: Any) -> tuple[dict[str, Any], Any]:
    """Return the schema of each key of objects in any alternative, and that of all other keys.

    For readers of values: parts that cannot be resolved allow any value.
    """
    objects: list[Mapping[str, Any]]
    try:
        objects = [
            alternative.schema
            for alternative in alternatives(schema, schema)
            if alternative.kind == "object"
        ]
    except GrammarFault:
        objects = [schema] if isinstance(schema, Mapping) else []
    members: dict[str, list[Any]] = {}
    others: list[Any] = []
    for each in objects:
        properties = each.get("properties")
        for key, inner in properties.items() if isinstance(properties, Mapping) else ():
            members.setdefault(key, []).append(inner)
        others.append(each.get("additionalProperties", True))
    return {key: _any_of(inner) for key, inner in members.items()}, _any_of(others)


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == value // 1 else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_listed(value: Any, values: list[Any]) -> bool:
    """Return whether a JSON value is in a list. True does not equal 1."""
    return any(value == other and kind_of(value) == kind_of(other) for other in values)


def _any_of(schemas: list[Any]) -> Any:
    distinct: list[Any] = []
    for schema in schemas:
        if schema not in distinct:
            distinct.append(schema)
    if len(distinct) == 1:
        return distinct[0]
    return {"anyOf": distinct} if distinct else True


class _Resolver:
    """Resolves the schemas inside `root`, in a bounded number of steps."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_resolved = 0

    def resolve(self, schema: Any, where: str, seen: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return schemas whose union is `schema`, each without references, unions and allOf.

        seen: the references that led here.
        """
        self._num_resolved += 1
        if self._num_resolved > MAX_RESOLVED_SCHEMAS:
            raise GrammarFault("too many schemas are combined in one place", where)
        if isinstance(schema, bool):
            return [{}] if schema else []
        if not isinstance(schema, Mapping):
            raise GrammarFault("a schema must be an object or a boolean", where)
        resolved = [{key: value for key, value in schema.items() if key not in _RESOLVED_KEYWORDS}]
        for part in self._parts(schema, where, seen):
            if len(part) * len(resolved) > MAX_ALTERNATIVES:
                raise GrammarFault(f"more than {MAX_ALTERNATIVES} alternatives", where)
            merged = [_merge_schemas(a, b, where) for a in resolved for b in part]
            resolved = [each for each in merged if each is not None]
        return resolved

    def _parts(
        self, schema: Mapping[str, Any], where: str, seen: tuple[str, ...]
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the resolved schemas that a schema combines, each as a union."""
        if (ref := schema.get("$ref")) is not None:
            if ref in seen:
                raise GrammarFault("a circular reference, which no text matches", where)
            target, place = _resolve_reference(ref, self._root, where)
            yield self.resolve(target, place, (*seen, ref))
        for i, inner in enumerate(schema.get("allOf", ())):
            yield self.resolve(inner, pointer(pointer(where, "allOf"), i), seen)
        for key in ("anyOf", "oneOf"):
            if key not in schema:
                continue
            union_where = pointer(where, key)
            branches = [
                self.resolve(inner, pointer(union_where, i), seen)
                for i, inner in enumerate(schema[key])
            ]
            if key == "oneOf":
                _check_disjoint(branches, union_where)
            yield [each for branch in branches for each in branch]


def _resolve_reference(ref: Any, root: Any, where: str) -> tuple[Any, str]:
    """Return the schema that a reference points to, and its pointer."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise GrammarFault("only references inside the schema (#/...) are followed", where)
    value = root
    for step in ref.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise GrammarFault(f"the reference {ref[:100]!r} does not exist", where)
    return value, ref[1:]


def _merge_schemas(a: Mapping[str, Any], b: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return the intersection of two schemas, None if it is empty."""
    merged = {**b, **a}
    for key in a.keys() & b.keys() - ANNOTATIONS:
        if a[key] == b[key]:
            continue
        if (intersect_values := _INTERSECT_VALUES.get(key)) is None:
            raise GrammarFault(f"{key} of two schemas at once cannot be enforced here", where)
        merged[key] = intersect_values(a[key], b[key])
    if merged.get("type") == []:
        return None
    if "properties" in merged:
        merged["properties"] = _merge_properties(a, b)
    if "enum" in merged and "const" in merged:
        merged["enum"] = [v for v in merged["enum"] if is_listed(v, [merged["const"]])]
        del merged["const"]
    return None if merged.get("enum") == [] else merged


def _merge_properties(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of objects that satisfy both schemas.

    A key that only one schema names is an additional property of the other one.
    """
    keys = dict.fromkeys([*a.get("properties", ()), *b.get("properties", ())])
    return {key: _intersection(_member(a, key), _member(b, key)) for key in keys}


def _member(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of an object's key."""
    return schema.get("properties", {}).get(key, schema.get("additionalProperties", True))


def _intersection(a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    if a == b or b is True or b == {}:
        return a
    return b if a is True or a == {} else {"allOf": [a, b]}


def _listed_values(schema: Any) -> list[Any] | None:
    """Return the values that a schema lists, None if it lists none."""
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types(given: str | list[str]) -> set[str]:
    """Return the types in `type`. "number" includes "integer"."""
    types = {given} if isinstance(given, str) else set(given)
    return types | {"integer"} if "number" in types else types


# Keyword -> function that intersects two values of it. `properties` needs the whole schemas
# (`_merge_properties`).
_INTERSECT_VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "type": lambda a, b: sorted(_types(a) & _types(b)),
    "required": lambda a, b: [*dict.fromkeys([*a, *b])],
    "enum": lambda a, b: [value for value in a if is_listed(value, b)],
    "properties": lambda a, _: a,
    "additionalProperties": _intersection,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}


def _split_by_kind(schema: Mapping[str, Any], where: str) -> Iterator[Alternative]:
    """Yield the alternatives of a schema without references and unions."""
    if not schema.keys() & (_RESTRICTING_KEYWORDS | {"type", "enum", "const"}):
        yield Alternative("any", {}, where)
        return
    values = _listed_values(schema)
    types = _types(schema["type"]) if "type" in schema else set(KINDS)
    for kind in KINDS:
        if kind not in types:
            continue
        keywords = _KEYWORDS_BY_KIND.get(kind, set()) | _KEYWORDS_OF_ALL_KINDS
        own = {key: value for key, value in schema.items() if key in keywords}
        if values is not None:
            own["enum"] = [value for value in values if kind_of(value) == kind]
            if not own["enum"]:
                continue
        elif kind == "integer" and "number" in types:
            continue  # included in "number"
        yield Alternative(kind, own, where)


def _check_disjoint(branches: list[list[dict[str, Any]]], where: str) -> None:
    """Raise GrammarFault if a value may satisfy two branches of a oneOf."""
    expanded = [
        [alternative for schema in branch for alternative in _split_by_kind(schema, where)]
        for branch in branches
    ]
    for first, second in combinations(expanded, 2):
        if not all(_are_disjoint(a, b) for a in first for b in second):
            raise GrammarFault(
                "oneOf whose schemas may overlap cannot be enforced; use anyOf", where
            )


def _are_disjoint(a: Alternative, b: Alternative) -> bool:
    if a.kind != b.kind:
        return "any" not in (a.kind, b.kind) and not {a.kind, b.kind} <= {"number", "integer"}
    if "enum" in a.schema and "enum" in b.schema:
        return not any(is_listed(value, b.schema["enum"]) for value in a.schema["enum"])
    return a.kind == "object" and (_excludes(a.schema, b.schema) or _excludes(b.schema, a.schema))


def _excludes(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether no object satisfies both schemas, because of a key that `a` requires.

    The key is forbidden in objects of `b`, or has other values there.
    """
    for key in a.get("required", ()):
        schema_of_b = _member(b, key)
        values_of_a = _listed_values(_member(a, key))
        values_of_b = _listed_values(schema_of_b)
        if schema_of_b is False:
            return True
        if values_of_a is None or values_of_b is None:
            continue
        if not any(is_listed(value, values_of_b) for value in values_of_a):
            return True
    return False
