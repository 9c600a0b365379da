"""HTTP answers that are no success: their error, and whether to try again."""

import random
import time
from collections.abc import Mapping
from email.utils import mktime_tz, parsedate_tz

import msgspec

from moeserve import errors
from moeserve.protocol import ErrorBody

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 8.0
MAX_RETRY_AFTER_S = 120.0

_BY_CODE = {
    kind.code: kind
    for kind in (
        errors.ContextLengthExceeded,
        errors.ModelNotFound,
        errors.EngineLost,
        errors.Overloaded,
    )
}
_BY_STATUS: dict[int, type[errors.RequestError]] = {429: errors.Overloaded} | {
    kind.http_status: kind
    for kind in (
        errors.InvalidRequest, errors.Unauthorized, errors.Forbidden, errors.NotFound,
        errors.Conflict, errors.PayloadTooLarge, errors.UnsupportedMedia, errors.RequestFailed,
        errors.Overloaded,
    )
}  # fmt: skip


class _Envelope(msgspec.Struct):
    """An error's body; some servers send a text instead of OpenAI's object."""

    error: ErrorBody | str | None = None


_decode = msgspec.json.Decoder(_Envelope).decode


def read_error(body: bytes) -> ErrorBody | None:
    """Return the error in a JSON body, None if there is none."""
    try:
        error = _decode(body).error
    except msgspec.MsgspecError:
        return None
    return ErrorBody(message=error) if isinstance(error, str) else error


def request_error(status: int, body: bytes, headers: Mapping[str, str]) -> errors.RequestError:
    """Return the exception for an answer with an error status.

    A body of another shape becomes its message.
    """
    details = read_error(body)
    if details is None:
        text = body[:200].decode("utf-8", "replace").strip()
        details = ErrorBody(
            message=f"HTTP {status}: {text}" if text else f"HTTP {status} without a message"
        )
    return build_error(status, details, headers)


def build_error(status: int, details: ErrorBody, headers: Mapping[str, str]) -> errors.RequestError:
    """Return the exception for an error.

    status: the HTTP status; 0 for an error inside a stream. Then the error's code decides, which
    may be a status, as in vLLM.
    """
    code = None if details.code is None else str(details.code)
    if status == 0 and code is not None and code.isdecimal():
        status = int(code)
    kind = _BY_CODE.get(code or "") or _BY_STATUS.get(status)
    if kind is None:
        kind = errors.RequestError if 400 <= status < 500 else errors.RequestFailed
    error = kind(details.message, code=code)
    if isinstance(error, errors.Overloaded):
        error.retry_after_s = retry_after_s(headers) or 1.0
    error.param = details.param
    if details.type is not None:
        error.type = details.type
    if status:
        error.http_status = status
    error.request_id = headers.get("x-request-id")
    return error


def should_retry(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether to try again: after 408, 409, 429 and 5xx, unless `x-should-retry` decides.

    Returns False if the server asks for a wait of more than MAX_RETRY_AFTER_S.
    """
    requested_s = retry_after_s(headers)
    if requested_s is not None and requested_s > MAX_RETRY_AFTER_S:
        return False
    server_choice = headers.get("x-should-retry", "").lower()
    if server_choice in ("true", "false"):
        return server_choice == "true"
    return status in (408, 409, 429) or status >= 500


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the server asks for, in `retry-after-ms` or in `Retry-After`, which
    has seconds or a date.
    """
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            value = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if 0.0 <= value < float("inf"):
            return value
    date = parsedate_tz(headers.get("retry-after", ""))
    return None if date is None else max(0.0, mktime_tz(date) - time.time())


def delay_s(attempt: int, headers: Mapping[str, str]) -> float:
    """Return the seconds to wait after try number `attempt` (0 is the first).

    If the server asks for a time, this is that time. Otherwise it is FIRST_DELAY_S, doubled each
    time up to MAX_DELAY_S, and shortened at random by up to a quarter, so that clients do not all
    return at once.
    """
    requested_s = retry_after_s(headers)
    if requested_s is not None and requested_s <= MAX_RETRY_AFTER_S:
        return requested_s
    backoff_s = min(FIRST_DELAY_S * 2.0**attempt, MAX_DELAY_S)
    return backoff_s * (1.0 - 0.25 * random.random())
