"""Values inside a request that are checked one by one, so that errors name their places: structs, and lists of objects
whose `type` says what they are.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from moeserve.errors import InvalidRequest
from moeserve.server.errors import shorten
from moeserve.server.requests import MEDIA, R, convert

Kinds = dict[str, type[Struct]]  # by type


class TextItem(Struct, kw_only=True):
    """A part of a content that is text."""

    text: str


def convert_at(value: Any, kind: type[R], where: str) -> R:
    """Returns a value inside a request as a struct. Raises InvalidRequest naming the field, under `where`."""
    try:
        return convert(value, kind)
    except InvalidRequest as error:
        param = f"{where}.{error.param}" if error.param else where
        what = error.message.removeprefix(error.param or "").strip()
        raise InvalidRequest(f"{param} {what}", param=param) from error


def typed_at(value: Any, kinds: Kinds, where: str, default: str = "") -> Any:
    """Returns an object as the struct in `kinds` that its `type` names. Raises InvalidRequest."""
    name = value.get("type") or default if isinstance(value, dict) else default
    if isinstance(name, str) and name in kinds:
        return convert_at(value, kinds[name], where)
    known = " or ".join(kinds)
    what = f"{where}.type must be {known}, not {shorten(str(name))!r}: {MEDIA}, and calls functions of yours"
    raise InvalidRequest(what, param=f"{where}.type", code="unsupported_parameter")


def text_at(content: str | list[dict[str, Any]], kinds: Kinds, where: str) -> str:
    """Returns the text of a content: itself, or its parts on lines of their own. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    return "\n".join(typed_at(part, kinds, f"{where}[{i}]").text for i, part in enumerate(content))


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors about a chat, raised inside the block, name the fields of another API."""
    try:
        yield
    except InvalidRequest as error:
        for theirs, ours in names.items():
            if error.param is not None and error.param.startswith(theirs):
                error.param = error.param.replace(theirs, ours, 1)
                error.message = error.message.replace(theirs, ours, 1)
        raise
