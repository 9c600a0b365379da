"""The errors: each branch of the tree says who is affected.

RequestError: one request fails, the engine lives (HTTP status, OpenAI-shaped body). ConfigError:
start-up stops at once with cause, remedy and exit code. ActorStopped, EngineDied, PeerLost,
StepSkew: a part of the system is gone.

Messages carry the offending values and the remedy. `assert` is only for our own bugs.
"""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

_FAULT = re.compile(
    r"(.*?)(?: - at `(?:key` in `)?\$\.?([^`]*)`)?", re.DOTALL
)  # a msgspec.ValidationError
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
    """Root of every error that moeserve raises on purpose."""


class RequestError(MoeserveError):
    """One request fails, and nothing else. http_status, type, code: as in OpenAI's API, those of
    the base if a subclass does not give its own."""

    http_status = 400
    type = "invalid_request_error"
    code: str | None = None
    request_id: str | None = None  # the client sets it from X-Request-Id

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
    """A field of the request is missing, of the wrong type, or out of its range."""


def invalid_request(error: msgspec.ValidationError) -> InvalidRequest:
    """Returns "Expected `int | null`, got `str` - at `$.n`" as "n must be an integer or null, got a
    string".
    """
    fault = _FAULT.fullmatch(str(error))
    assert fault is not None
    message = fault[1]
    param = (fault[2] or "").removesuffix("[...]")
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
    """Returns what an exception is and where it was raised, on one line, without its text: that may
    quote a request.
    """
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    places = [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames)
    ]
    return " < ".join([type(error).__name__, *places])


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """The prompt alone does not fit into the model's context."""

    num_tokens = 0  # of the prompt
    max_tokens = 0  # of the longest prompt that fits, with an answer of one token
    exact = True  # False: num_tokens is a lower bound


class Unauthorized(
    RequestError, http_status=401, type="authentication_error", code="invalid_api_key"
):
    """The API key is missing or wrong."""


class Forbidden(
    RequestError, http_status=403, type="permission_error", code="insufficient_permissions"
):
    """The API key does not allow this."""


class NotFound(RequestError, http_status=404, code="not_found"):
    """There is no such route or object."""


class ModelNotFound(NotFound, code="model_not_found"):
    """The server does not serve this model."""


class Conflict(RequestError, http_status=409, code="conflict"):
    """The server's present state does not allow this; the message says why."""


class PayloadTooLarge(RequestError, http_status=413, code="payload_too_large"):
    """The request body is too large."""


class UnsupportedMedia(RequestError, http_status=415, code="unsupported_media_type"):
    """The request body is not JSON, or has an unsupported encoding."""


class Overloaded(RequestError, http_status=503, type="server_error", code="server_overloaded"):
    """The server takes no more requests now. retry_after_s: estimated seconds until it does."""

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, code: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded, http_status=429, code="rate_limit_exceeded"):
    """The caller's key has used up its rate. kind: what of, requests or tokens."""

    def __init__(self, message: str, *, kind: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.type = kind


class DeadlineExceeded(
    RequestError, http_status=504, type="server_error", code="deadline_exceeded"
):
    """The request did not finish within the time that its sender, or the server's settings, gave
    it.
    """


class RequestFailed(RequestError, http_status=500, type="server_error", code="internal_error"):
    """A fault inside this one request."""


class ConstraintFailed(
    RequestFailed, http_status=400, type="invalid_request_error", code="constraint_failed"
):
    """What the request allows its answer to be left no token to choose, or costs too much to
    enforce.
    """


class EngineLost(RequestError, http_status=503, type="server_error", code="engine_lost"):
    """The engine process died while the request ran. Sending it again is safe."""


class Unreachable(RequestError, http_status=0, type="connection_error", code="connection_error"):
    """The server sent no complete answer: the connection was refused, broke, or was silent for too
    long.
    """


class ConfigError(MoeserveError):
    """Start-up cannot go on; the message says what to change."""

    exit_code = 2

    @classmethod
    @contextmanager
    def instead_of(cls, kinds: ErrorKinds, what: object, remedy: str = "") -> Iterator[None]:
        """Raises this error in place of those in the block: what failed, why, and the remedy."""
        try:
            yield
        except kinds as error:
            why = (
                error.strerror
                if isinstance(error, OSError) and str(error.filename or "") in str(what)
                else None
            )
            raise cls(f"{what}: {why or error}{remedy}") from None


class CheckpointError(ConfigError):
    """A model file is missing, damaged, or not what its config says."""

    exit_code = 3


class AddressInUse(ConfigError):
    """Another process listens on the address."""

    exit_code = 4


class DoesNotFit(ConfigError):
    """Not enough memory; the message gives the number that would fit."""

    exit_code = 5


class ActorStopped(MoeserveError):
    """The actor ended before it answered; the message names it and the cause."""


class EngineDied(MoeserveError):
    """The engine has ended and serves no request any more."""


class PeerLost(MoeserveError):
    """Other ranks of the group are gone, or this rank has to leave: the step failed, the engine did
    not.

    missing: the expert-parallel ranks that did not answer; empty if unknown.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class StepSkew(MoeserveError):
    """The engines of a group do not vote on the same step: a bug, after which the group is formed
    again.
    """

    def __init__(self, positions: Sequence[tuple[int, int]]) -> None:
        where = ", ".join(
            f"engine {i} in epoch {epoch}, step {step}" for i, (epoch, step) in enumerate(positions)
        )
        super().__init__(f"the engines are not in the same step: {where}")
