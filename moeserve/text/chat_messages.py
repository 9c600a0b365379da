"""A conversation as chat templates take it, and parts of its conversions."""

import json
from typing import Any, NamedTuple

Message = dict[str, Any]


class TemplateInput(NamedTuple):
    """What a template renders."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    listing: str = ""  # of the tools, where a message has it


def joined(first: Message, second: Message) -> Message:
    """Return `first` with the texts of both."""
    texts = [message["content"] for message in (first, second) if message.get("content")]
    return first | {"content": "\n\n".join(texts)}


def without(message: Message, field: str) -> Message:
    return {name: value for name, value in message.items() if name != field}


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
