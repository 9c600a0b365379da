"""Resumable streams: the ids of their events, and the requests that resume one after an event.

An id has the number of tokens of each choice that were sent, with "e" if the choice had ended:
`KEY:17.12e`. One delta may give several events, and there are events before the first delta and
after the last one. `KEY:17.12+0.3~2` is the second event of the delta that added three tokens to
choice 0. To resume, `Numbered` writes the answer again with deltas that end at these positions, and
drops the events that the client has.
"""

import hashlib
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moeserve.errors import InvalidRequest
from moeserve.frontend.journal import StreamLog
from moeserve.frontend.resumable import unknown_stream
from moeserve.server.call import RESUMABLE_PATHS, RESUME_HEADER, HttpCall, not_resumable
from moeserve.server.http import path_of

_ID = re.compile(
    r"(?P<key>[0-9a-f]{32}):(?P<counts>\d{1,9}e?(?:\.\d{1,9}e?)*)"
    r"(?:\+(?P<choice>\d{1,9})\.(?P<part_tokens>\d{1,9})(?P<part_end>e?))?"
    r"(?:~(?P<events>\d{1,9}))?",
    re.ASCII,
)


@dataclass
class StreamPosition:
    """A position in an answer, which may be inside a delta."""

    num_tokens: list[int]  # of each choice
    has_ended: list[bool]  # whether each choice has ended
    # Events that the client has of the delta, the opening or the closing at this position
    num_events: int = 0
    choice: int = -1  # choice of the delta; -1: the position is between deltas
    num_part_tokens: int = 0  # tokens of the delta that the position is in
    part_ends_choice: bool = False  # whether the delta ends the choice

    @property
    def is_start(self) -> bool:
        """Whether the position is before the first delta."""
        return self.choice < 0 and not any(self.num_tokens) and not any(self.has_ended)

    def delta_ends(self) -> dict[int, set[int]]:
        """Return the numbers of tokens of each choice after which a delta must end."""
        delta_ends = {index: {count} for index, count in enumerate(self.num_tokens)}
        if self.choice >= 0:
            delta_ends[self.choice].add(self.num_tokens[self.choice] + self.num_part_tokens)
        return delta_ends


@dataclass
class StreamKey:
    """The identity of a resumable stream."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    digest: bytes = b""  # of the request
    known_log: StreamLog | None = None  # the log of the stream to resume; None: a new stream
    position: StreamPosition | None = None  # after which to resume; None: a new stream


def identify_stream(call: HttpCall, body: dict[str, Any]) -> StreamKey | None:
    """Return the key of the stream that a request begins or resumes; None for other answers.

    If the request resumes a stream, this sets `call.id` to the id of the original request. Raises
    RequestError for an invalid Last-Event-ID.
    """
    path = path_of(call.request)
    last_id = call.request.headers.get(RESUME_HEADER)
    if last_id is None and (path not in RESUMABLE_PATHS or body.get("stream") is not True):
        return None
    resumable = call.context.serving()[0].resumable
    if last_id is None:
        return StreamKey(digest=_digest(path, body))
    if path not in RESUMABLE_PATHS:
        raise not_resumable()
    if resumable is None:
        raise InvalidRequest(
            f"{RESUME_HEADER}: this server does not resume streams; set `resume_window: 30` under "
            "`server:` in the file for --config",
            param=RESUME_HEADER,
        )
    if (match := _ID.fullmatch(last_id)) is None:
        raise InvalidRequest(
            f"{RESUME_HEADER} must be the id of an event of a stream, as it was sent",
            param=RESUME_HEADER,
        )
    known_log = resumable.journal.streams.get(match["key"])
    if known_log is None or known_log.entry.owner != call.caller.owner:
        raise unknown_stream()
    entry = known_log.entry
    position = _position(match)
    num_choices = len(entry.rids)
    if len(position.num_tokens) != num_choices or position.choice >= num_choices:
        raise no_such_event()
    if entry.digest != _digest(path, body):
        raise InvalidRequest(
            f"{RESUME_HEADER}: this stream answers another request; send the same path and body "
            "again",
            param=RESUME_HEADER,
        )
    call.id = entry.request_id
    return StreamKey(
        id=entry.id,
        created=entry.created,
        digest=entry.digest,
        known_log=known_log,
        position=position,
    )


def _position(match: re.Match[str]) -> StreamPosition:
    """Return the position in an id. match: a match of `_ID`."""
    counts = match["counts"].split(".")
    position = StreamPosition(
        num_tokens=[int(count.rstrip("e")) for count in counts],
        has_ended=[count[-1] == "e" for count in counts],
        num_events=int(match["events"] or 0),
    )
    if match["choice"] is not None:
        position.choice = int(match["choice"])
        position.num_part_tokens = int(match["part_tokens"])
        position.part_ends_choice = bool(match["part_end"])
    return position


def no_such_event() -> InvalidRequest:
    """Return the error for an id of no event of the stream."""
    return InvalidRequest(f"{RESUME_HEADER}: the answer has no such event", param=RESUME_HEADER)


def _digest(path: str, body: dict[str, Any]) -> bytes:
    return hashlib.sha256(path.encode() + b"\0" + msgspec.json.encode(body)).digest()
