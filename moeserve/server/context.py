"""What the handlers share: the settings, the front end once it exists, and what runs at the moment."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web

from moeserve.config import ServerConfig
from moeserve.errors import ModelNotFound, Overloaded
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Phase, Ready
from moeserve.server.auth import Auth, Caller
from moeserve.server.chunks import Counts
from moeserve.server.errors import SERVER, shorten
from moeserve.server.running import RunningAnswer
from moeserve.server.sse import SseStream
from moeserve.version import __version__


@dataclass
class Context:
    """`front` is None while its process is still reading the model's files; probes answer all the same."""

    config: ServerConfig
    auth: Auth
    front: FrontEnd | None = None
    draining: bool = False
    started: bool = False  # has been ready at least once
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.monotonic)
    running: dict[str, list[RunningAnswer]] = field(default_factory=dict)  # by request id, which two requests may share
    streams: set[SseStream] = field(default_factory=set)
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)  # (route, status) -> how many

    @property
    def phase(self) -> Phase:
        if self.front is None:
            return Phase("reading the model's files", 0, time.monotonic() - self.began)
        return self.front.phase

    @property
    def state(self) -> str:
        if self.draining:
            return "draining"
        if self.front is None:
            return "loading"
        return "stalled" if self.front.state == "ready" and not self.front.healthy else self.front.state

    def serving(self) -> tuple[FrontEnd, Ready]:
        """Raises Overloaded (503) while no model is loaded or the server drains."""
        if self.draining:
            raise Overloaded("the server is shutting down", code="server_draining", retry_after_s=5)
        if self.front is None or self.front.ready is None:
            raise Overloaded(f"the model is loading: {self.phase.name}", code="model_loading", retry_after_s=2)
        return self.front, self.front.ready


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

    def headers(self) -> dict[str, str]:
        """For every answer to this request."""
        headers = {"X-Request-Id": self.id, "Server": SERVER}
        if self.unknown:
            names = ", ".join(self.unknown).encode("ascii", "replace").decode().replace('"', "'")
            headers["Warning"] = f'299 moeserve "unknown fields ignored: {names}"'
        return headers

    def salt(self, asked: str | None) -> str:
        """Keeps prefix-cache hits, which can be timed, inside one key's requests."""
        owner = self.caller.owner if self.context.auth.several_owners else ""
        return f"{owner}:{asked or ''}" if owner or asked else ""


def check_model(front: FrontEnd, asked: str | None) -> None:
    """One model is served, so its name may be left out."""
    if asked is not None and asked != front.model_name:
        raise ModelNotFound(
            f"the model {shorten(asked)!r} does not exist here; this server has {front.model_name!r}", param="model"
        )


def fingerprint(ready: Ready) -> str:
    """OpenAI's system_fingerprint: changes when the same seed may give other tokens."""
    return f"moeserve-{__version__}-{ready.device.partition(' ')[0]}-{ready.dtype}"
