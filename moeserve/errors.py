"""The exceptions of moeserve. The branch of an error says what it ends:

- RequestError: one request. The engine keeps running; the client gets an HTTP status and a body in
  OpenAI's format.
- ConfigError: the start of the process, with an exit code.
- ActorStopped, EngineDied, PeerLost, StepSkew: a process or a connection between processes.

Messages contain the wrong value and a remedy. `assert` is only for bugs of moeserve itself.
"""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

# The text of a msgspec.ValidationError: message, path of the field
_VALIDATION_ERROR = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$\.?([^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_TYPES = re.compile(r"`([a-z |]+)`")
ErrorKinds = type[Exception] | tuple[type[Exception], ...]
_JSON_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
}


class MoeserveError(Exception):
    """Base class of the errors that moeserve raises."""


class RequestError(MoeserveError):
    """An error that ends one request.

    Subclasses set the HTTP status, and `type` and `code` of OpenAI's error body, or inherit them.
    """

    http_status = 400
    type = "invalid_request_error"
    code: str | None = None
    request_id: str | None = None  # set by the client from the header X-Request-Id

    def __init_subclass__(
        cls, *, http_status: int | None = None, type: str = "", code: str = ""
    ) -> None:
        cls.http_status = cls.http_status if http_status is None else http_status
        cls.type = type or cls.type
        cls.code = code or cls.code

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError, code="invalid_value"):
    """A field of the request is missing, has a wrong type, or is out of range."""


def invalid_request(error: msgspec.ValidationError) -> InvalidRequest:
    """Return a validation error in the words of the API.

    "Expected `int | null`, got `str` - at `$.n`" -> "n must be an integer or null, got a string"
    """
    match = _VALIDATION_ERROR.fullmatch(str(error))
    assert match is not None
    message = match[1]
    param = (match[2] or "").removesuffix("[...]")
    if missing := _MISSING.match(message):
        param = f"{param}.{missing[1]}" if param else missing[1]
        message = "is required"
    elif message.startswith("Expected "):
        message = message.replace("Expected", "must be", 1)
        message = _TYPES.sub(
            lambda m: " or ".join(_JSON_TYPES.get(name, name) for name in m[1].split(" | ")),
            message,
        )
    else:
        message = f"is not accepted: {message}"
    return InvalidRequest(f"{param} {message}".lstrip(), param=param or None)


def place_of(error: BaseException) -> str:
    """Return the type of an exception and its stack, innermost frame first, on one line for logs.

    Without the message, which may quote a request.
    """
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    calls = [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames)
    ]
    return " < ".join([type(error).__name__, *calls])


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """The prompt alone does not fit into the model's context."""

    num_tokens = 0  # tokens of the prompt
    max_tokens = 0  # tokens of the longest prompt that leaves one token for the answer
    exact = True  # False: num_tokens is a lower bound


class Unauthorized(
    RequestError, http_status=401, type="authentication_error", code="invalid_api_key"
):
    """The API key is missing or wrong."""


class Forbidden(
    RequestError, http_status=403, type="permission_error", code="insufficient_permissions"
):
    """The API key does not permit the request."""


class NotFound(RequestError, http_status=404, code="not_found"):
    """The route or object does not exist."""


class ModelNotFound(NotFound, code="model_not_found"):
    """The server does not serve this model."""


class Conflict(RequestError, http_status=409, code="conflict"):
    """The server's current state does not permit the request."""


class PayloadTooLarge(RequestError, http_status=413, code="payload_too_large"):
    """The request body is too large."""


class UnsupportedMedia(RequestError, http_status=415, code="unsupported_media_type"):
    """The request body is not JSON, or has an unsupported encoding."""


class Overloaded(RequestError, http_status=503, type="server_error", code="server_overloaded"):
    """The server's queue is full. retry_after_s: estimated seconds until it has room again."""

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, code: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded, http_status=429, code="rate_limit_exceeded"):
    """The API key has reached its rate limit. kind: of which, "requests" or "tokens"."""

    def __init__(self, message: str, *, kind: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.type = kind


class DeadlineExceeded(
    RequestError, http_status=504, type="server_error", code="deadline_exceeded"
):
    """The request did not finish before its deadline, set by the client or by the server."""


class RequestFailed(RequestError, http_status=500, type="server_error", code="internal_error"):
    """An internal error that affected this request alone."""


class ConstraintFailed(
    RequestFailed, http_status=400, type="invalid_request_error", code="constraint_failed"
):
    """The answer's constraints leave no token to choose, or cost too much to enforce."""


class EngineLost(RequestError, http_status=503, type="server_error", code="engine_lost"):
    """The engine process died while the request ran. It is safe to send the request again."""


class Unreachable(RequestError, http_status=0, type="connection_error", code="connection_error"):
    """The client got no complete answer: the connection was refused, broke or timed out."""


class ConfigError(MoeserveError):
    """The process cannot start. The message says what to change."""

    exit_code = 2

    @classmethod
    @contextmanager
    def instead_of(cls, kinds: ErrorKinds, what: object, remedy: str = "") -> Iterator[None]:
        """Convert exceptions of `kinds` in the block to this error.

        The message is "`what`: cause" and `remedy`.
        """
        try:
            yield
        except kinds as error:
            cause: object = error
            if isinstance(error, OSError) and str(error.filename or "") in str(what):
                cause = error.strerror or error  # `what` names the file already
            raise cls(f"{what}: {cause}{remedy}") from None


class CheckpointError(ConfigError):
    """A model file is missing, damaged, unsupported, or does not match its config."""

    exit_code = 3


class IncompressibleWeights(CheckpointError):
    """The values of a weight do not allow `lossless_compression`."""


class AddressInUse(ConfigError):
    """Another process listens on the address."""

    exit_code = 4


class DoesNotFit(ConfigError):
    """There is not enough memory. The message has the number that would fit."""

    exit_code = 5


class ActorStopped(MoeserveError):
    """The actor ended before it answered. The message has its name and the cause."""


class EngineDied(MoeserveError):
    """The engine has ended, with all of its requests."""


class PeerLost(MoeserveError):
    """The step failed, because other ranks are gone or this rank has to leave its group.

    The engine itself keeps running. missing: the expert-parallel ranks that did not answer; empty
    if unknown.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class StepSkew(MoeserveError):
    """The engines of a group vote on different steps. This is a bug; the group is formed again."""

    def __init__(self, positions: Sequence[tuple[int, int]]) -> None:
        where = ", ".join(
            f"engine {i} in epoch {epoch}, step {step}" for i, (epoch, step) in enumerate(positions)
        )
        super().__init__(f"the engines are not in the same step: {where}")
