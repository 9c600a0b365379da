"""The state of the server, which all handlers share."""

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from moeserve.config import ServerConfig
from moeserve.errors import ModelNotFound, Overloaded
from moeserve.frontend.front_end import FrontEnd
from moeserve.hub.progress import Progress
from moeserve.messages import Phase, Ready
from moeserve.server.access_log import Observer
from moeserve.server.auth import Auth
from moeserve.server.body import BodyMemory
from moeserve.server.cors import Cors
from moeserve.server.errors import shorten
from moeserve.server.file_objects import Batch
from moeserve.server.file_store import FileStore
from moeserve.server.http import SseStream
from moeserve.server.response_store import ResponseStore
from moeserve.server.running import RunningRequest
from moeserve.server.tls import Tls

DEFAULT_TAG = ":latest"  # Ollama's clients add it to names without a tag


class BatchRunner(Protocol):
    """Runs batches, and has the files of their lines."""

    store: FileStore

    async def create(self, owner: str, batch: Batch) -> None:
        """Store a new batch, and start it."""

    async def cancel(self, owner: str, batch: Batch) -> None:
        """End a batch without answering more of its lines."""

    async def stop(self) -> None:
        """Stop all batches; the next start of the server continues them."""

    async def close(self) -> None:
        """Close the files."""


@dataclass
class Context:
    """The state of the server, which all handlers share."""

    config: ServerConfig
    auth: Auth
    front: FrontEnd | None = None  # None while the model's files are read; probes answer already
    download: Progress | None = None  # of the model, before its files are read
    draining: bool = False
    started: bool = False  # has been ready at least once
    created: int = field(default_factory=lambda: int(time.time()))
    began_at_s: float = field(default_factory=time.monotonic)
    # Running requests by id. Two requests may have the same id.
    running: dict[str, list[RunningRequest]] = field(default_factory=dict)
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    streams: set[SseStream] = field(default_factory=set)
    # The number of responses by (route, status).
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    batches: BatchRunner | None = None  # None: batches and files are off
    tls: Tls | None = None
    # Called with every finished request but probes.
    observers: list[Observer] = field(default_factory=list)
    store: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        self.cors = Cors(self.config) if self.config.allowed_origins else None
        self.store = ResponseStore(self.config.max_stored_responses, self.config.max_stored_bytes)

    @property
    def state(self) -> str:
        """The status that the probes show; see `protocol.StatusResponse`."""
        if self.draining:
            return "draining"
        if self.front is None:
            return "loading"
        if self.front.state == "ready" and not self.front.healthy:
            return "stalled"
        return self.front.state

    @property
    def phase(self) -> Phase:
        """The progress of the start, or of a group that forms again. Otherwise its name is that of
        the state.
        """
        forming = self.front is not None and self.front.phase.percent < 100
        if self.state in ("ready", "draining") or (self.state == "stalled" and not forming):
            return Phase(self.state, 100, time.monotonic() - self.began_at_s)
        if self.front is None:
            elapsed_s = time.monotonic() - self.began_at_s
            if self.download is not None:
                return Phase(str(self.download), self.download.percent, elapsed_s)
            return Phase("reading the model's files", 0, elapsed_s)
        return self.front.phase

    @property
    def stage(self) -> str:
        """The name of the phase, without figures that change all the time."""
        if self.front is None and self.download is not None and not self.draining:
            return self.download.title
        return self.phase.name

    def show_download(self, progress: Progress) -> None:
        """Show how far the download of the model is."""
        self.download = progress

    def serving(self, model: str | None = None) -> tuple[FrontEnd, Ready]:
        """Return the front end, and the engine's facts about the model.

        Raises Overloaded (503) while no model is loaded or the server drains, and ModelNotFound if
        `model` is given and is not the one that is served.
        """
        if self.draining:
            raise Overloaded("the server is shutting down", code="server_draining", retry_after_s=5)
        if self.front is None or self.front.ready is None:
            raise Overloaded(
                f"the model is loading: {self.phase.name}", code="model_loading", retry_after_s=2
            )
        if model is not None and not _is_served(model, self.front.model_names):
            served = ", ".join(map(repr, self.front.model_names))
            what = f"the model {shorten(model)!r} does not exist; this server has {served}"
            raise ModelNotFound(what, param="model")
        return self.front, self.front.ready


def _is_served(name: str, served: Collection[str]) -> bool:
    """Return whether a request may name the model so: with and without Ollama's default tag."""
    return any(
        name in (known, known + DEFAULT_TAG, known.removesuffix(DEFAULT_TAG)) for known in served
    )
