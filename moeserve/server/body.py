"""From the bytes of a request to a checked struct. Strange input is refused here, before it costs anything."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from moeserve.errors import InvalidRequest, PayloadTooLarge, RequestError, UnsupportedMedia
from moeserve.server.errors import RequestTimeout, shorten

MAX_DEPTH = 64
MAX_CONTAINERS = 100_000  # objects and arrays in one body
LARGE_BODY = 256 * 1024  # bytes; such a body is parsed in a thread
READ_TIMEOUT_S = 30.0  # for each MiB of a body
# Possessive, so that a long string leaves nothing to go back to: that would take a hundred bytes for each of its own.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PATH = re.compile(r"(.*) - at `(?:key` in `)?\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_TYPES = re.compile(r"`([a-z |]+)`")
_JSON_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
}
_SWITCHES = {"true": True, "1": True, "": True, "false": False, "0": False}

T = TypeVar("T")


async def read_json(request: web.BaseRequest, max_bytes: int) -> dict[str, Any]:
    """Returns the JSON object in the body. Raises a RequestError of status 400, 408, 413 or 415."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMedia(f"Content-Encoding {shorten(encoding)} is not accepted; send the body as it is")
    if request.content_type.lower() != "application/json":
        raise UnsupportedMedia("the Content-Type must be application/json")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise UnsupportedMedia("the charset must be utf-8")
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    body = await _read(request, max_bytes)
    return parse_object(body) if len(body) < LARGE_BODY else await asyncio.to_thread(parse_object, body)


def _too_large(max_bytes: int) -> RequestError:
    return PayloadTooLarge(f"the body is larger than {max_bytes:,} bytes")


async def _read(request: web.BaseRequest, max_bytes: int) -> bytes:
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # otherwise the answer's head would be taken for sent
    body = bytearray()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S) as limit:
            while chunk := await request.content.readany():
                before = len(body) >> 20
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if len(body) >> 20 > before:
                    limit.reschedule(loop.time() + READ_TIMEOUT_S)
    except TimeoutError as error:
        raise RequestTimeout(f"the body did not arrive within {READ_TIMEOUT_S:g} s") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest("the body is not framed as HTTP demands", code="invalid_http") from error
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the one JSON object in `body`. Raises InvalidRequest with code invalid_json and the byte offset."""
    if body[:3] == b"\xef\xbb\xbf" or body[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise _invalid("the body begins with a byte order mark; send plain UTF-8", 0)
    _check_shape(body)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _invalid("the body is not UTF-8", error.start) from error
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _invalid(f"the body is not JSON: {error.msg}", len(text[: error.pos].encode())) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {shorten(str(error))}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    if _SURROGATE.search(body):
        _check_unicode(value)
    return value


def _invalid(message: str, offset: int) -> InvalidRequest:
    return InvalidRequest(f"{message} (byte {offset})", code="invalid_json")


def _check_shape(body: bytes) -> None:
    """Bounds depth and number of containers, without recursion. A body with few brackets cannot be deep."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = containers = 0
    for match in _TOKEN.finditer(body):
        byte = body[match.start()]
        if byte in b"[{":
            depth += 1
            containers += 1
            if depth > MAX_DEPTH:
                raise _invalid(f"the JSON is nested deeper than {MAX_DEPTH}", match.start())
            if containers > MAX_CONTAINERS:
                raise _invalid(f"the JSON has more than {MAX_CONTAINERS:,} objects and arrays", match.start())
        elif byte in b"]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{shorten(twice)!r} occurs twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_unicode(value: Any) -> None:
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest("a string holds an unpaired surrogate", code="invalid_json") from error


def convert(value: dict[str, Any], kind: type[T]) -> T:
    """Returns `value` as a struct; types are strict ("5" is no integer). Raises InvalidRequest naming the field."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        message, param = str(error), ""
        if match := _PATH.match(message):
            message, param = match.group(1), shorten(match.group(2))
        if match := _MISSING.match(message):
            param = f"{param}.{match.group(1)}" if param else match.group(1)
            raise InvalidRequest(f"{param} is required", param=param) from error
        message = _in_json_words(message)
        raise InvalidRequest(f"{param} {message}" if param else message, param=param or None) from error


def _in_json_words(message: str) -> str:
    """Returns msgspec's "Expected `int | null`, got `str`" as "must be an integer or null, got a string"."""
    if not message.startswith("Expected "):
        return f"is not accepted: {message}"
    words = _TYPES.sub(lambda m: " or ".join(_JSON_TYPES.get(name, name) for name in m[1].split(" | ")), message)
    return words.replace("Expected", "must be", 1)


def unknown_fields(names: Iterable[str], known: frozenset[str], prefix: str = "") -> list[str]:
    """Returns those `names` that mean nothing to us, at most five, printable, with the nearest name that does."""
    described = []
    for name in [name for name in names if name not in known][:5]:
        near = get_close_matches(name[:64], known, 1)
        described.append(f"{prefix}{shorten(name)}" + (f" (did you mean {near[0]}?)" if near else ""))
    return described


def number(query: Mapping[str, str], name: str, default: float, low: float, high: float) -> float:
    """Returns a parameter of the URL's query. Raises InvalidRequest for anything but a number from low to high."""
    given = query.get(name)
    if given is None:
        return default
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, not {shorten(given)!r}", param=name)
    return value


def switch(query: Mapping[str, str], name: str, default: bool) -> bool:
    """Returns a parameter of the URL's query. Raises InvalidRequest for anything but true and false."""
    given = query.get(name)
    if given is None:
        return default
    if given.lower() not in _SWITCHES:
        raise InvalidRequest(f"{name} must be true or false, not {shorten(given)!r}", param=name)
    return _SWITCHES[given.lower()]
