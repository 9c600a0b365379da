"""From an HTTP answer that is not a success to the error of `moeserve.errors` that says the same."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from moeserve import errors
from moeserve.client.retry import retry_after_s
from moeserve.client.types import ErrorBody, ErrorEnvelope

_BY_CODE: dict[str, type[errors.RequestError]] = {
    "context_length_exceeded": errors.ContextLengthExceeded,
    "model_not_found": errors.ModelNotFound,
    "engine_lost": errors.EngineLost,
    "server_overloaded": errors.Overloaded,
}
_BY_STATUS: dict[int, type[errors.RequestError]] = {
    400: errors.InvalidRequest,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.PayloadTooLarge,
    415: errors.UnsupportedMedia,
    429: errors.Overloaded,
    500: errors.RequestFailed,
    503: errors.Overloaded,
}
_decode = msgspec.json.Decoder(ErrorEnvelope).decode


def read_error(body: bytes) -> ErrorBody | None:
    """The error in a JSON body, or None if it has none."""
    try:
        error = _decode(body).error
    except msgspec.MsgspecError:
        return None
    return ErrorBody(message=error) if isinstance(error, str) else error


def request_error(status: int, body: bytes, headers: Mapping[str, str]) -> errors.RequestError:
    """The exception for an answer with an error status. A body that is not ours becomes the message, cut to 200."""
    found = read_error(body)
    if found is None:
        text = body[:200].decode("utf-8", "replace").strip()
        found = ErrorBody(message=f"HTTP {status}: {text}" if text else f"HTTP {status} without a message")
    return build_error(status, found, headers)


def build_error(status: int, found: ErrorBody, headers: Mapping[str, str]) -> errors.RequestError:
    """`status` 0: the error came inside a stream, so its code decides (vLLM puts the status there)."""
    code = None if found.code is None else str(found.code)
    if status == 0 and code is not None and code.isdecimal():
        status = int(code)
    kind = _BY_CODE.get(code or "") or _BY_STATUS.get(status)
    if kind is None:
        kind = errors.RequestError if 400 <= status < 500 else errors.RequestFailed
    if kind is errors.Overloaded:
        error: errors.RequestError = errors.Overloaded(
            found.message, retry_after_s=retry_after_s(headers) or 1.0, code=code
        )
    else:
        error = kind(found.message, code=code)
    error.param = found.param
    if found.type is not None:
        error.type = found.type
    if status:
        error.http_status = status
    error.request_id = headers.get("x-request-id")
    return error
