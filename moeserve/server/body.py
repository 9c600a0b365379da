"""The body of a request: from its bytes to a JSON object, within bounds of size, time and shape."""

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from moeserve import errors
from moeserve.server.errors import HttpError, shorten
from moeserve.text.json_schema import reject_constant

MAX_DEPTH = 64
MAX_CONTAINERS = 100_000  # objects and arrays in one body
MIN_BYTES_FOR_THREAD = 256 * 1024  # a body of this size or more is parsed in a thread
MAX_UNCOUNTED_BYTES = 64 * 1024  # smaller bodies are always accepted
MAX_COUNTED_BYTES = 256 * 2**20  # of all larger bodies that are being read or parsed
READ_TIMEOUT_S = 30.0  # for each MiB of a body
# Possessive quantifiers: otherwise each character of a long string would be a backtracking position
# of a hundred bytes.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[\]{}]', re.DOTALL)
# Media types of requests of curl, which is given no type, as aiohttp reports them
_CURLS_TYPES = ("application/octet-stream", "application/x-www-form-urlencoded")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass
class BodyMemory:
    """Counts the memory of the large bodies that are being read or parsed."""

    num_bytes: int = 0


async def read_json(
    request: web.BaseRequest, max_bytes: int, memory: BodyMemory, *, from_curl: bool = False
) -> dict[str, Any]:
    """Return the JSON object in the body.

    from_curl: the Content-Type may also be absent, or that of `curl -d`.

    Raises a RequestError of status 400, 408, 413, 415, or 503 if other bodies take too much memory.
    """
    _check_media_type(request, from_curl=from_curl)
    _check_size(request.content_length or 0, max_bytes)
    await continue_body(request)
    body = bytearray()
    num_counted = 0  # bytes of this body in `memory`
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S) as timeout:
            while chunk := await request.content.readany():
                num_mib = len(body) >> 20
                body += chunk
                _check_size(len(body), max_bytes)
                if len(body) > MAX_UNCOUNTED_BYTES:
                    memory.num_bytes += len(chunk)
                    num_counted += len(chunk)
                    if memory.num_bytes > max(MAX_COUNTED_BYTES, max_bytes):
                        raise errors.Overloaded(
                            "too many large bodies arrive at once", retry_after_s=2
                        )
                if len(body) >> 20 > num_mib:  # each MiB restarts the timeout
                    timeout.reschedule(loop.time() + READ_TIMEOUT_S)
    except TimeoutError as error:
        raise HttpError(
            408, "request_timeout", f"the body did not arrive within {READ_TIMEOUT_S:g} s"
        ) from error
    except web.RequestPayloadError as error:
        raise errors.InvalidRequest(
            "the body's framing is not valid HTTP", code="invalid_http"
        ) from error
    else:
        if len(body) < MIN_BYTES_FOR_THREAD:
            return parse_object(body)
        return await asyncio.to_thread(parse_object, body)
    finally:
        memory.num_bytes -= num_counted


async def continue_body(request: web.BaseRequest) -> None:
    """Ask for the body if the client waits with `Expect: 100-continue`."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # otherwise aiohttp assumes that the answer's head was sent


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise errors.PayloadTooLarge(f"the body is larger than {max_bytes:,} bytes")


def _check_media_type(request: web.BaseRequest, *, from_curl: bool) -> None:
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise errors.UnsupportedMedia(
            f"Content-Encoding {shorten(encoding)} is not supported; send the body uncompressed"
        )
    media_type = request.content_type.lower()
    if media_type != "application/json" and not (from_curl and media_type in _CURLS_TYPES):
        raise errors.UnsupportedMedia("the Content-Type must be application/json")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise errors.UnsupportedMedia("the charset must be utf-8")


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises InvalidRequest with the byte offset."""
    if body[:3] == b"\xef\xbb\xbf" or body[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise _invalid_json("the body begins with a byte order mark; send plain UTF-8", 0)
    _check_shape(body)
    try:
        text = body.decode()
        value = json.loads(text, object_pairs_hook=_object, parse_constant=reject_constant)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _invalid_json(
            f"the body is not JSON: {error.msg}", len(text[: error.pos].encode())
        ) from error
    except UnicodeDecodeError as error:
        raise _invalid_json("the body is not UTF-8", error.start) from error
    except UnicodeEncodeError as error:
        raise _invalid_json("a string has an unpaired surrogate") from error
    except (ValueError, RecursionError) as error:
        raise _invalid_json(f"the body is not JSON: {shorten(str(error))}") from error
    if not isinstance(value, dict):
        raise _invalid_json("the body must be a JSON object")
    return value


def _invalid_json(message: str, offset: int | None = None) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        message if offset is None else f"{message} (byte {offset})", code="invalid_json"
    )


def _check_shape(body: bytes | bytearray) -> None:
    """Limit the depth and the number of containers, without recursion."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return  # too few brackets to be deep
    depth = 0
    containers = 0
    for match in _TOKEN.finditer(body):
        byte = body[match.start()]
        if byte in b"[{":
            depth += 1
            containers += 1
            if depth > MAX_DEPTH:
                raise _invalid_json(f"the JSON is nested deeper than {MAX_DEPTH}", match.start())
            if containers > MAX_CONTAINERS:
                raise _invalid_json(
                    f"the JSON has more than {MAX_CONTAINERS:,} objects and arrays", match.start()
                )
        elif byte in b"]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {shorten(twice)!r} is repeated in an object")
    return members
