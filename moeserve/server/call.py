"""One HTTP request and the response to it."""

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec
from aiohttp import web

from moeserve.errors import InvalidRequest
from moeserve.server.auth import OPEN, Caller
from moeserve.server.body import read_json
from moeserve.server.context import Context
from moeserve.server.errors import SERVER, ErrorShape, shorten
from moeserve.server.http import path_of
from moeserve.server.requests import convert, decode, unknown_fields
from moeserve.server.running import Counts

RESUME_HEADER = "Last-Event-ID"
RESUMABLE_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")

R = TypeVar("R", bound=msgspec.Struct)


@dataclass
class HttpCall:
    """One HTTP request: reads its body and its URL, and makes the response to it."""

    has_deadline: ClassVar[bool] = True  # whether request_timeout and its header apply

    context: Context
    request: web.BaseRequest
    id: str
    caller: Caller = OPEN
    tail: str = ""  # the rest of the path, for routes that end in a slash
    unknown: list[str] = field(default_factory=list)  # unknown fields in the body
    ignored: list[str] = field(default_factory=list)  # known fields that have no effect
    # For the log:
    began_at_s: float = field(default_factory=time.monotonic)
    counts: Counts | None = None  # of a generating request
    first_token_at_s: float | None = None
    error: str = ""  # code of the error in the answer

    @property
    def error_shape(self) -> ErrorShape:
        """The shape of errors, which depends on the API that the path belongs to."""
        path = path_of(self.request) + "/"
        if path.startswith("/v1/messages/"):
            return "anthropic"
        # /api/v0 is LM Studio's API, whose errors are OpenAI's.
        if path.startswith("/api/") and not path.startswith("/api/v0/"):
            return "ollama"
        return "openai"

    async def read(self, kind: type[R]) -> R:
        """Return the body as a checked struct.

        Raises a RequestError of status 400, 408, 413, 415 or 503.
        """
        request, _ = await self.read_with_raw(kind)
        if RESUME_HEADER in self.request.headers:
            raise not_resumable()
        return request

    async def read_with_raw(self, kind: type[R]) -> tuple[R, dict[str, Any]]:
        """Return the body as a checked struct, and as plain JSON."""
        # Ollama's documentation calls curl without a Content-Type. Browsers add an Origin to every
        # POST, so pages of other origins still cannot send such a request.
        by_curl = self.error_shape == "ollama" and "Origin" not in self.request.headers
        body = await read_json(
            self.request,
            self.context.config.max_request_bytes,
            self.context.body_memory,
            from_curl=by_curl,
        )
        request, unknown, self.ignored = decode(body, kind)
        self.note_unknown(unknown)
        return request, body

    def query(self, kind: type[R]) -> R:
        """Return the parameters of the URL as a struct; `?x` alone means true. Raises
        InvalidRequest.
        """
        given = {name: value or "true" for name, value in self.request.query.items()}
        self.note_unknown(unknown_fields(given, kind.__struct_fields__))
        try:
            return convert(given, kind, strict=False)
        except InvalidRequest as error:
            what = error.message.removesuffix(", got a string")
            shown = shorten(given.get(error.param or "", ""))
            raise InvalidRequest(f"{what}, not {shown!r}", param=error.param) from None

    def note_unknown(self, unknown: list[str]) -> None:
        """Refuse unknown fields if `strict` is set. Otherwise the Warning header names them."""
        if unknown and self.context.config.strict:
            raise InvalidRequest(
                f"unknown fields: {', '.join(unknown)}", param=unknown[0], code="unknown_parameter"
            )
        self.unknown = unknown

    def headers(self) -> dict[str, str]:
        """Return the headers of every answer to this request."""
        headers = {"X-Request-Id": self.id, "Server": SERVER}
        if self.context.cors is not None:
            headers |= self.context.cors.headers(self.request)
        if self.caller.rate_limits is not None:
            headers |= self.caller.rate_limits.headers()
        if self.error_shape == "anthropic":
            headers["Request-Id"] = self.id
        warnings = {"unknown fields ignored": self.unknown, "no effect here": self.ignored}
        if self.unknown or self.ignored:
            headers["Warning"] = ", ".join(
                _warning(f"{what}: {', '.join(names)}") for what, names in warnings.items() if names
            )
        return headers

    def answer(self, body: msgspec.Struct, status: int = 200, **headers: str) -> web.Response:
        """Return the response with `body` as JSON."""
        return web.Response(
            body=msgspec.json.encode(body),
            status=status,
            content_type="application/json",
            headers=self.headers() | headers,
        )


def not_resumable() -> InvalidRequest:
    """Return the error for a Last-Event-ID on a route without resumable streams."""
    return InvalidRequest(
        f"{RESUME_HEADER} is for streams of {', '.join(RESUMABLE_PATHS)}", param=RESUME_HEADER
    )


def _warning(text: str) -> str:
    """Return a value of the Warning header (RFC 9111, 5.5), whose text is quoted ASCII."""
    text = text.encode("ascii", "replace").decode().replace('"', "'")
    return f'299 moeserve "{text}"'
