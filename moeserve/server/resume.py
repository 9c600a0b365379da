"""Streams that go on: ids of events, and the rest of an answer behind one of them.

An id says how many tokens of each choice had come, with "e" for a choice that had ended:
`KEY:17.12e`. Several events may come of one delta, or before the first and behind the last one;
`KEY:17.12+0.3~2` is the second one of the delta that brought choice 0 three more tokens. The answer
is rendered again with deltas that end at these places, up to them in vain.
"""

import hashlib
import re
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from moeserve.errors import InvalidRequest
from moeserve.frontend.generation import Delta
from moeserve.frontend.journal import StreamLog
from moeserve.frontend.resumable import unknown_stream

if TYPE_CHECKING:
    from moeserve.server.answer import Frames
    from moeserve.server.app import HttpCall

RESUME_HEADER = "Last-Event-ID"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
_ID = re.compile(
    r"([0-9a-f]{32}):(\d{1,9}e?(?:\.\d{1,9}e?)*)(?:\+(\d{1,9})\.(\d{1,9})(e?))?(?:~(\d{1,9}))?",
    re.ASCII,
)


@dataclass
class StreamPlace:
    """A place in an answer: tokens of each choice, whether it has ended, and events behind that.
    choice, more, ends: of the delta that these events are of, if it is one."""

    tokens: list[int]
    ended: list[bool]
    events: int = 0
    choice: int = -1
    more: int = 0
    ends: bool = False

    def cuts(self) -> dict[int, set[int]]:
        """Return the token counts of each choice at which a delta has to end."""
        cuts = {index: {num} for index, num in enumerate(self.tokens)}
        if self.choice >= 0:
            cuts[self.choice].add(self.tokens[self.choice] + self.more)
        return cuts


@dataclass
class StreamKey:
    """What a resumable stream is known by. recorded, place: of one that goes on."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    digest: bytes = b""
    recorded: StreamLog | None = None
    place: StreamPlace | None = None


def stream_key(call: "HttpCall", body: dict[str, Any]) -> StreamKey | None:
    """Returns the key of a stream that is kept, None for other answers. Raises RequestError for a
    wrong Last-Event-ID. A request that goes on with a stream gets the id of the one that began it.
    """
    path = call.request.raw_path.partition("?")[0]
    last = call.request.headers.get(RESUME_HEADER)
    if last is None and (path not in PATHS or body.get("stream") is not True):
        return None
    resumable = call.context.serving()[0].resumable
    if last is None:
        return StreamKey(digest=_digest(path, body))
    if path not in PATHS:
        raise InvalidRequest(
            f"{RESUME_HEADER} is for streams of {', '.join(PATHS)}", param=RESUME_HEADER
        )
    if resumable is None:
        what = "this server keeps no streams: put `resume_window: 30` under `server:` in the file for --config"
        raise InvalidRequest(f"{RESUME_HEADER}: {what}", param=RESUME_HEADER)
    if (match := _ID.fullmatch(last)) is None:
        what = f"{RESUME_HEADER} must be the id of an event of a stream, as it was sent"
        raise InvalidRequest(what, param=RESUME_HEADER)
    recorded = resumable.journal.streams.get(match[1])
    if recorded is None or recorded.entry.owner != call.caller.owner:
        raise unknown_stream()
    entry = recorded.entry
    counts = match[2].split(".")
    place = StreamPlace(
        [int(count.rstrip("e")) for count in counts], [count[-1] == "e" for count in counts]
    )
    place.events = int(match[6] or 0)
    if match[3] is not None:
        place.choice = int(match[3])
        place.more = int(match[4])
        place.ends = bool(match[5])
    if len(counts) != len(entry.rids) or place.choice >= len(counts):
        raise _no_such_event()
    if entry.digest != _digest(path, body):
        what = f"{RESUME_HEADER}: this stream answers another request; send the same path and body again"
        raise InvalidRequest(what, param=RESUME_HEADER)
    call.id = entry.request_id
    return StreamKey(entry.id, entry.created, entry.digest, recorded, place)


def _no_such_event() -> InvalidRequest:
    return InvalidRequest(f"{RESUME_HEADER}: the answer has no such event", param=RESUME_HEADER)


def _digest(path: str, body: dict[str, Any]) -> bytes:
    return hashlib.sha256(path.encode() + b"\0" + msgspec.json.encode(body)).digest()


def _events(frames: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in frames.split(b"\n\n")[:-1]]


class Numbered:
    """Frames (see `answer.Frames`) whose events have ids. skip: events of the closing that are left
    out.
    """

    def __init__(self, frames: "Frames", key: str, num_choices: int) -> None:
        self._frames = frames
        self._head = b"id: %b:" % key.encode()
        self.tokens = [0] * num_choices
        self.ended = [False] * num_choices
        self.skip = 0
        self.failure = frames.failure

    def opening(self) -> bytes:
        """Returns the frames before the first delta."""
        return self._with_ids(self._frames.opening(), self._place(), None)

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """Returns the frames of a delta."""
        frames = self._frames.frames(prompt, delta)
        i = delta.index
        more = len(delta.token_ids)
        ends = delta.finish_reason is not None
        during = (
            self._place() + b"+%d.%d%b" % (i, more, b"e" if ends else b"")
            if frames.count(b"\n\n") > 1
            else b""
        )
        self.tokens[i] += more
        self.ended[i] |= ends
        return self._with_ids(frames, during, self._place())

    def closing(self) -> bytes:
        """Returns the frames after the last delta."""
        return b"".join(
            _events(self._with_ids(self._frames.closing(), self._place(), None))[self.skip :]
        )

    def _place(self) -> bytes:
        pairs = zip(self.tokens, self.ended, strict=True)
        return b".".join([b"%de" % count if ended else b"%d" % count for count, ended in pairs])

    def _with_ids(self, frames: bytes, during: bytes, after: bytes | None) -> bytes:
        """Returns frames with ids. during: the place of all events but the last one; after: that of
        the last one.
        """
        out = b""
        events = _events(frames)
        for number, event in enumerate(events, 1):
            last = number == len(events) and after is not None
            out += (
                self._head
                + (after if last and after else b"%b~%d" % (during, number))
                + b"\n"
                + event
            )
        return out

    async def go_on(self, deltas: AsyncIterator[tuple[int, Delta]], place: StreamPlace) -> bytes:
        """Returns the frames of an answer behind a place, as far as the answer is known.

        deltas: from the first one on, cut at the place (see `StreamPlace.cuts`). Raises InvalidRequest if the answer ends
        before that place.
        """
        opening = _events(self.opening())
        begins = place.choice < 0 and not any(place.tokens) and not any(place.ended)
        out = b"".join(opening[place.events :]) if begins else b""
        part = Delta(place.choice)
        rest = dict[int, Delta]()
        while (
            self.tokens != place.tokens
            or self.ended != place.ended
            or len(part.token_ids) < place.more
            or (place.ends and part.finish_reason is None)
        ):
            if (found := await anext(deltas, None)) is None:
                raise _no_such_event()
            delta = found[1]
            i = found[1].index
            ends = delta.finish_reason is not None
            num = len(delta.token_ids)
            if self.tokens[i] + num <= place.tokens[i] and ends <= place.ended[i]:
                self.frames(0, delta)
            elif (
                i == place.choice and len(part.token_ids) + num <= place.more and ends <= place.ends
            ):
                part.append(delta)
            else:
                rest.setdefault(i, Delta(i)).append(delta)
        if place.choice >= 0:
            out += b"".join(_events(self.frames(0, part))[place.events :])
        elif all(self.ended):
            self.skip = place.events
        return out + b"".join([self.frames(0, delta) for delta in rest.values()])
