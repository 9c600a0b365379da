"""Failures as JSON: {"error": {"message", "type", "param", "code"}}, or in the shape of Anthropic's
or Ollama's API.

A 500 reveals nothing about the server's internals. Its text is fixed; the request id identifies the
log line.
"""

import logging
import math
import random
import re
from collections.abc import Sequence
from typing import Literal

import msgspec
from aiohttp import web

from moeserve.errors import Overloaded, RequestError, RequestFailed, place_of
from moeserve.protocol import ErrorBody, ErrorResponse

log = logging.getLogger(__name__)

ErrorShape = Literal["openai", "anthropic", "ollama"]

SERVER = "moeserve"  # the Server header: no versions
MAX_ECHO = 64  # characters of a user's value that may come back in a message
MAX_MESSAGE = 600
# The name of an exception, and its text, which may quote a request
_EXCEPTION = re.compile(r"(\w+(?:Error|Exception)): .*", re.DOTALL)
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_QUOTED = re.compile(r"'([^']{65,})'|`([^`]{65,})`")


class AnthropicErrorBody(msgspec.Struct):
    """An error of /v1/messages, by Anthropic's types."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, tag="error"):
    """An error answer of /v1/messages; other routes have `ErrorResponse`."""

    error: AnthropicErrorBody
    request_id: str


class OllamaError(msgspec.Struct):
    """An error answer of /api/..., and the line that ends a stream which failed."""

    error: str


class HttpError(RequestError):
    """An error at the HTTP level: malformed bytes, sizes, timeouts, methods.

    allowed: the path's methods, for status 405.
    """

    def __init__(self, status: int, code: str, message: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(message, code=code)
        self.http_status = status
        self.allowed = allowed


def shorten(value: str) -> str:
    """Return a user's value, safe to show in a message: printable and at most 64 characters."""
    printable = "".join(char if char.isprintable() else "?" for char in value[: MAX_ECHO + 1])
    return printable if len(printable) <= MAX_ECHO else printable[: MAX_ECHO - 3] + "..."


def error_message(error: RequestError, request_id: str) -> str:
    """Return the message for the client. Long quoted values are shortened; a 500 has only the
    request id.
    """
    if error.http_status == 500:
        return f"internal server error; request id {request_id}"
    message = _QUOTED.sub(lambda match: repr(shorten(match[1] or match[2])), error.message)
    return message[:MAX_MESSAGE]


def error_body(error: RequestError, request_id: str, *, shape: ErrorShape = "openai") -> bytes:
    """Return the error as JSON."""
    message = error_message(error, request_id)
    if shape == "ollama":
        return msgspec.json.encode(OllamaError(message))
    if shape == "anthropic":
        other_kind = "invalid_request_error" if error.http_status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(error.http_status, other_kind)
        return msgspec.json.encode(AnthropicError(AnthropicErrorBody(kind, message), request_id))
    return msgspec.json.encode(
        ErrorResponse(ErrorBody(message, error.type, error.param, error.code))
    )


def as_request_error(error: BaseException, request_id: str) -> RequestError:
    """Return a RequestError unchanged. Any other exception is a bug: log it and return a plain 500.

    Exception texts, which may quote a request, are logged at level debug only.
    """
    if isinstance(error, RequestError):
        if error.http_status == 500:
            message = _EXCEPTION.sub(r"\1", error.message)
            log.error("request %s failed: %s", request_id, shorten_line(message))
        return error
    log.error("request %s failed: %s", request_id, place_of(error))
    log.debug("request %s failed", request_id, exc_info=error)
    return RequestFailed("internal server error")


def shorten_line(text: str) -> str:
    """Return the text as one log line: control characters escaped, at most 500 characters."""
    return text[:500].encode("unicode_escape").decode("ascii")


def error_response(
    error: RequestError, request_id: str, *, shape: ErrorShape = "openai"
) -> web.Response:
    """Return the response with the status, the body and the headers that belong to the status."""
    headers = {"X-Request-Id": request_id, "Server": SERVER}
    if isinstance(error, Overloaded) and math.isinf(error.retry_after_s):
        headers["X-Should-Retry"] = "false"  # OpenAI's clients heed it, and so do batches
    elif isinstance(error, Overloaded):
        # Refused clients must not return all at once.
        wait_s = error.retry_after_s * random.uniform(1.0, 1.5)
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
        headers["Retry-After-Ms"] = str(max(1, round(wait_s * 1000)))
    elif error.http_status == 503:
        headers["Retry-After"] = "1"
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HttpError) and error.allowed:
        headers["Allow"] = ", ".join(error.allowed)
    return web.Response(
        body=error_body(error, request_id, shape=shape),
        status=error.http_status,
        content_type="application/json",
        headers=headers,
    )
