"""Structural tags: free text with tags in it whose contents are JSON, as vLLM and SGLang take them.

A literal of a tag that spells a special token means that token.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from moeserve.errors import invalid_request
from moeserve.sampling import GrammarSpec, NonEmpty
from moeserve.text.json_schema import GrammarFault, check_schema, json_of, schema_text


class _Structure(Struct):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _Document(Struct, forbid_unknown_fields=True):
    structures: Annotated[list[_Structure], Meta(min_length=1)]
    triggers: list[NonEmpty]


def structural_tag(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """Returns the Lark grammar: text up to the first trigger, then one of the structures that begin
    with it, and so on. Raises GrammarFault."""
    try:
        document = msgspec.convert(json_of(spec.text), _Document)
    except msgspec.ValidationError as error:
        raise GrammarFault(invalid_request(error).message) from error
    bodies: dict[str, list[str]] = {}
    for tag in document.structures:
        trigger = next(
            (trigger for trigger in document.triggers if tag.begin.startswith(trigger)), None
        )
        if trigger is None:
            raise GrammarFault(f"{tag.begin!r} begins with none of the triggers")
        check_schema(tag.schema)
        begin = literal(tag.begin[len(trigger) :], special)
        end = literal(tag.end, special)
        bodies.setdefault(trigger, []).append(
            f"{begin} %json {schema_text(tag.schema, spec)} {end}"
        )
    rules = [r"TEXT: /(.|\n)*/"]
    tags = []
    for i, (trigger, alternatives) in enumerate(bodies.items()):
        until = f"TEXT {literal(trigger, special)}"
        if not (name := special_in(trigger, special)):
            rules.append(f"until_{i}[lazy]: {until}")
            until = f"until_{i}"
        elif not trigger.startswith(name):
            raise GrammarFault(f"{name} may only be at the beginning of {trigger!r}")
        tags.append(f"{until} ({' | '.join(alternatives)})")
    return "\n".join([f"start: ({' | '.join(tags)})* TEXT", *rules])


def _pattern(special: Mapping[str, int]) -> re.Pattern[str]:
    names = sorted(special, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, names))})" if names else "((?!))")


def special_in(text: str, special: Mapping[str, int]) -> str:
    """Returns the first special token in a text, "" if there is none."""
    found = _pattern(special).search(text)
    return found[0] if found else ""


def literal(text: str, special: Mapping[str, int]) -> str:
    """Returns the Lark of a text in which special tokens are meant."""
    parts = enumerate(_pattern(special).split(text))  # text, name, text, name, ..., text
    return " ".join(f"<[{special[p]}]>" if i % 2 else f"/{exactly(p)}/" for i, p in parts if p)


def exactly(text: str) -> str:
    """Returns the regex of one text, free of signs that mean something in a regex or in Lark."""
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text
    )
