"""Structural tags, as in vLLM and SGLang: free text with tags that contain JSON.

Literals of a tag that spell special tokens stand for these tokens.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from moeserve.errors import invalid_request
from moeserve.sampling import GrammarSpec, NonEmpty
from moeserve.text.json_schema import GrammarFault, checked_schema, parse_grammar_json, schema_text
from moeserve.text.lark import TEXT, literal, special_in


class _Structure(Struct):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _Document(Struct, forbid_unknown_fields=True):
    structures: Annotated[list[_Structure], Meta(min_length=1)]
    triggers: list[NonEmpty]


def structural_tag(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """Return the Lark grammar of a structural tag. Raise GrammarFault.

    It allows text up to the first trigger, then one of the structures that begin with this trigger,
    and so on.
    """
    try:
        document = msgspec.convert(parse_grammar_json(spec.text), _Document)
    except msgspec.ValidationError as error:
        raise GrammarFault(invalid_request(error).message) from error
    bodies: dict[str, list[str]] = {}
    for tag in document.structures:
        trigger = next(
            (trigger for trigger in document.triggers if tag.begin.startswith(trigger)), None
        )
        if trigger is None:
            raise GrammarFault(f"{tag.begin!r} begins with none of the triggers")
        begin = literal(tag.begin[len(trigger) :], special)
        end = literal(tag.end, special)
        bodies.setdefault(trigger, []).append(
            f"{begin} %json {schema_text(checked_schema(tag.schema), spec)} {end}"
        )
    rules = [TEXT]
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
