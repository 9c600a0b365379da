"""The error tree: who is hurt decides the branch.

    MoeserveError
      RequestError      this request fails, the engine lives (HTTP status, OpenAI-shaped body)
        InvalidRequest    400: a field is out of its range; `param` names it
          ContextLengthExceeded
        Unauthorized      401      Forbidden    403      ModelNotFound 404
        Conflict          409: not in the state that the server is in now
        PayloadTooLarge   413      UnsupportedMedia 415
        Overloaded        503 with Retry-After: the queue is full, or the server drains or loads
        RequestFailed     500: a fault inside this one request (its sampling, say)
        EngineLost        503, retryable: the engine died while this request ran
        Unreachable       no whole answer came: refused, reset, silent or cut off (only the client raises it)
      ConfigError       start-up stops at once with cause, remedy and exit code
        CheckpointError   the model's files are wrong (exit code 3)
        AddressInUse      (4)
        DoesNotFit        memory (5)
      ActorStopped      the addressee ended before it could answer
      EngineDied        nobody can answer; the supervisor acts
      PeerLost          other ranks are gone: a step failed, the engine waits for the next Join
      StepSkew          the ranks disagree about where they are; the same follows

Messages carry the offending values and the remedy. `assert` is only for our own bugs.
"""

from __future__ import annotations

from collections.abc import Sequence


class MoeserveError(Exception):
    """Root of every error that moeserve raises on purpose."""


class RequestError(MoeserveError):
    """One request fails; nothing else does. `type` and `code` are OpenAI's words."""

    http_status = 400
    type = "invalid_request_error"
    code: str | None = None
    request_id: str | None = None  # the client sets it from X-Request-Id

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """A field of the request is missing, of the wrong type, or out of its range."""

    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """The prompt alone does not fit into the model's context."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    http_status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    http_status = 403
    type = "permission_error"
    code = "insufficient_permissions"


class NotFound(RequestError):
    http_status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Conflict(RequestError):
    """The server is not in a state in which this can be done; the message says why."""

    http_status = 409
    code = "conflict"


class PayloadTooLarge(RequestError):
    http_status = 413
    code = "payload_too_large"


class UnsupportedMedia(RequestError):
    http_status = 415
    code = "unsupported_media_type"


class Overloaded(RequestError):
    """Try again later: `retry_after_s` is an estimate in seconds."""

    http_status = 503
    type = "server_error"
    code = "server_overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class RequestFailed(RequestError):
    """A fault inside this one request; the server is well."""

    http_status = 500
    type = "server_error"
    code = "internal_error"


class EngineLost(RequestError):
    """The engine process died while the request ran. Sending it again is safe."""

    http_status = 503
    type = "server_error"
    code = "engine_lost"


class Unreachable(RequestError):
    """No whole answer came from the server: the connection was refused, broke, or stayed silent too long."""

    http_status = 0
    type = "connection_error"
    code = "connection_error"


class ConfigError(MoeserveError):
    """Start-up cannot go on; the message says what to change."""

    exit_code = 2


class CheckpointError(ConfigError):
    """A model file is missing, damaged, or not what its config says."""

    exit_code = 3


class AddressInUse(ConfigError):
    exit_code = 4


class DoesNotFit(ConfigError):
    """Not enough memory; the message gives the number that would fit."""

    exit_code = 5


class ActorStopped(MoeserveError):
    """The actor ended before it answered; the message names it and the cause."""


class EngineDied(MoeserveError):
    """The engine cannot serve anyone any more."""


class PeerLost(MoeserveError):
    """Ranks of this rank's group are gone, or it was told to part: the step failed, the engine did not.

    missing: the expert-parallel ranks that did not answer; empty when it is not known who.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class StepSkew(MoeserveError):
    """The engines of a group do not vote on the same step: a bug of ours, and reason enough to form it anew."""

    def __init__(self, positions: Sequence[tuple[int, int]]) -> None:
        where = ", ".join(f"engine {i} in epoch {epoch}, step {step}" for i, (epoch, step) in enumerate(positions))
        super().__init__(f"the engines are not in the same step: {where}")
