"""The state that the handlers share: keys, settings, the front end once it exists, and the requests that run now."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, InvalidRequest, ModelNotFound, Overloaded, Unauthorized
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Phase, Ready
from moeserve.server.body import read_json, unknown_fields
from moeserve.server.errors import SERVER, shorten
from moeserve.server.requests import decode
from moeserve.version import __version__

if TYPE_CHECKING:
    from moeserve.server.answer import RunningRequest
    from moeserve.server.chunks import Counts
    from moeserve.server.http import SseStream

MAX_KEY_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. owner: names the key without revealing it; "" when the server is open."""

    owner: str = ""
    is_admin: bool = False


OPEN = Caller()


class Auth:
    """The keys, kept and compared as SHA-256 digests, all of them each time, so that timing tells nothing.

    With user keys every route but the probes needs one; without, the server is open. The constructor raises ConfigError
    for a key file that cannot be read or holds no key.
    """

    def __init__(self, config: ServerConfig) -> None:
        keys = [*config.api_key, *_read_keys(config.api_key_file, "--api-key-file")]
        self._user = [_digest(key) for key in keys]
        self._admin = [_digest(key) for key in _read_keys(config.admin_key_file, "--admin-key-file")]
        if any(not key for key in keys):
            raise ConfigError("--api-key: an empty key protects nothing")

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._user)

    @property
    def has_admins(self) -> bool:
        """Whether there are keys for the administrative routes."""
        return bool(self._admin)

    @property
    def several_owners(self) -> bool:
        """Whether requests of different owners must be kept apart."""
        return len(self._user) > 1

    def check(self, headers: Mapping[str, str]) -> Caller:
        """Returns the caller. Raises Unauthorized unless the request carries a known key or none is needed."""
        presented = _presented(headers)
        digest = _digest(presented or "")
        is_admin = _any_equal(self._admin, digest)
        is_user = _any_equal(self._user, digest)
        if presented is not None and (is_admin or is_user):
            return Caller(digest.hex()[:16], is_admin)
        if not self._user:
            return OPEN
        raise Unauthorized("missing or wrong API key; send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`")


def _presented(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    found = key.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key")
    return found if found and len(found) <= MAX_KEY_CHARS else None


def _any_equal(digests: list[bytes], digest: bytes) -> bool:
    found = False
    for known in digests:  # every one is compared, also after a match
        found |= hmac.compare_digest(known, digest)
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read_keys(path: str | None, flag: str) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} {path}: no key in it; one per line is expected")
    return keys


@dataclass
class Context:
    """The state of the server. front: None while its process still reads the model's files; probes answer already."""

    config: ServerConfig
    auth: Auth
    front: FrontEnd | None = None
    draining: bool = False
    started: bool = False  # has been ready at least once
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.monotonic)
    running: dict[str, list[RunningRequest]] = field(default_factory=dict)  # by id, which two requests may share
    streams: set[SseStream] = field(default_factory=set)
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)  # (route, status) -> how many

    @property
    def phase(self) -> Phase:
        """The progress of the start, or of a group that forms anew; otherwise the phase is named like the state."""
        forming = self.front is not None and self.front.phase.percent < 100
        if self.state in ("ready", "draining") or (self.state == "stalled" and not forming):
            return Phase(self.state, 100, time.monotonic() - self.began)
        if self.front is None:
            return Phase("reading the model's files", 0, time.monotonic() - self.began)
        return self.front.phase

    @property
    def state(self) -> str:
        """The status that the probes show; see `protocol.StatusResponse`."""
        if self.draining:
            return "draining"
        if self.front is None:
            return "loading"
        return "stalled" if self.front.state == "ready" and not self.front.healthy else self.front.state

    def serving(self, model: str | None = None) -> tuple[FrontEnd, Ready]:
        """Returns the front end and what is known of the model.

        Raises Overloaded (503) while no model is loaded or the server drains, and ModelNotFound if `model`, which may
        be left out, is not the one that is served.
        """
        if self.draining:
            raise Overloaded("the server is shutting down", code="server_draining", retry_after_s=5)
        if self.front is None or self.front.ready is None:
            raise Overloaded(f"the model is loading: {self.phase.name}", code="model_loading", retry_after_s=2)
        if model is not None and model != self.front.model_name:
            served = self.front.model_name
            raise ModelNotFound(
                f"the model {shorten(model)!r} does not exist here; this server has {served!r}", param="model"
            )
        return self.front, self.front.ready


R = TypeVar("R", bound=msgspec.Struct)


@dataclass
class HttpCall:
    """One HTTP request on its way through a handler."""

    context: Context
    request: web.BaseRequest
    id: str
    caller: Caller
    tail: str = ""  # what follows a route that ends in a slash
    unknown: list[str] = field(default_factory=list)  # request fields that mean nothing to us
    counts: Counts | None = None  # of a generating request

    async def read(self, kind: type[R]) -> R:
        """Returns the body as a checked struct. Raises a RequestError of status 400, 408, 413 or 415."""
        request, unknown = decode(await read_json(self.request, self.context.config.max_request_bytes), kind)
        self._note_unknown(unknown)
        return request

    def query(self, *known: str) -> Mapping[str, str]:
        """Returns the parameters of the URL, of which this route has the `known` ones."""
        self._note_unknown(unknown_fields(self.request.query, frozenset(known)))
        return self.request.query

    def _note_unknown(self, unknown: list[str]) -> None:
        """Raises InvalidRequest under --strict; otherwise the answer carries a Warning header."""
        if unknown and self.context.config.strict:
            raise InvalidRequest(f"unknown fields: {', '.join(unknown)}", param=unknown[0], code="unknown_parameter")
        self.unknown = unknown

    def headers(self) -> dict[str, str]:
        """Returns the headers of every answer to this request."""
        headers = {"X-Request-Id": self.id, "Server": SERVER}
        if self.unknown:
            names = ", ".join(self.unknown).encode("ascii", "replace").decode().replace('"', "'")
            headers["Warning"] = f'299 moeserve "unknown fields ignored: {names}"'
        return headers

    def answer(self, body: msgspec.Struct, status: int = 200, **headers: str) -> web.Response:
        """Returns the response with `body` as JSON."""
        return web.Response(
            body=msgspec.json.encode(body),
            status=status,
            content_type="application/json",
            headers=self.headers() | headers,
        )

    def salt(self, asked: str | None) -> str:
        """Returns the salt that keeps prefix-cache hits, which can be timed, inside one key's requests."""
        owner = self.caller.owner if self.context.auth.several_owners else ""
        return f"{owner}:{asked or ''}" if owner or asked else ""

    def head(self, prefix: str, object: str, front: FrontEnd, ready: Ready) -> dict[str, Any]:
        """Returns the fields that whole answers and chunks begin with.

        The fingerprint changes when the same seed may give other tokens.
        """
        return {
            "id": f"{prefix}-{self.id}",
            "object": object,
            "created": int(time.time()),
            "model": front.model_name,
            "system_fingerprint": f"moeserve-{__version__}-{ready.device.partition(' ')[0]}-{ready.dtype}",
        }
