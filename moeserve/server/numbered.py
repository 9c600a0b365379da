"""Event ids of streams, and resuming an answer after one of them. `resume.py` explains the ids."""

from collections.abc import AsyncIterator

from moeserve.errors import RequestError
from moeserve.frontend.generation import Delta
from moeserve.server.resume import StreamPosition, no_such_event
from moeserve.server.writer import StreamWriter


class Numbered(StreamWriter):
    """Adds ids to the events of another writer, whose answer has one prompt."""

    def __init__(self, writer: StreamWriter, key: str, num_choices: int) -> None:
        self._writer = writer
        self._id_prefix = b"id: %b:" % key.encode()
        self._num_tokens = [0] * num_choices  # written so far, by choice
        self._has_ended = [False] * num_choices  # by choice
        self._num_skipped_events = 0  # of the closing, because the client has them

    def opening(self) -> bytes:
        return self._with_ids(
            self._writer.opening(), inner_position=self._position(), last_position=None
        )

    def frames(self, prompt: int, delta: Delta) -> bytes:
        frames = self._writer.frames(prompt, delta)
        i = delta.index
        ends_choice = delta.finish_reason is not None
        inner_position = b""
        if frames.count(b"\n\n") > 1:
            end_mark = b"e" if ends_choice else b""
            inner_position = self._position() + b"+%d.%d%b" % (i, len(delta.token_ids), end_mark)
        self._num_tokens[i] += len(delta.token_ids)
        self._has_ended[i] |= ends_choice
        return self._with_ids(frames, inner_position=inner_position, last_position=self._position())

    def closing(self) -> bytes:
        frames = self._with_ids(
            self._writer.closing(), inner_position=self._position(), last_position=None
        )
        return b"".join(_events(frames)[self._num_skipped_events :])

    def failure(self, error: RequestError, request_id: str) -> bytes:
        return self._writer.failure(error, request_id)

    def ping(self) -> bytes:
        return self._writer.ping()

    def _position(self) -> bytes:
        pairs = zip(self._num_tokens, self._has_ended, strict=True)
        return b".".join([b"%de" % count if ended else b"%d" % count for count, ended in pairs])

    def _with_ids(
        self, frames: bytes, *, inner_position: bytes, last_position: bytes | None
    ) -> bytes:
        """Return the events of some frames with ids.

        inner_position: the position of all events but the last.
        last_position: the position of the last event; None if it is `inner_position`, too.
        """
        frames_out = b""
        events = _events(frames)
        for number, event in enumerate(events, 1):
            if number == len(events) and last_position is not None:
                id = last_position
            else:
                id = b"%b~%d" % (inner_position, number)
            frames_out += self._id_prefix + id + b"\n" + event
        return frames_out

    async def resume(
        self, deltas: AsyncIterator[tuple[int, Delta]], position: StreamPosition
    ) -> bytes:
        """Return the known events of an answer after a position.

        deltas: all deltas from the first on. None crosses the position (see
            `StreamPosition.delta_ends`).
        Raises InvalidRequest if the answer ends before the position.
        """
        opening = _events(self.opening())
        out = b"".join(opening[position.num_events :]) if position.is_start else b""
        part = Delta(position.choice)  # the delta that contains the position
        rest = dict[int, Delta]()  # the known answer after the position, by choice
        while (
            self._num_tokens != position.num_tokens
            or self._has_ended != position.has_ended
            or len(part.token_ids) < position.num_part_tokens
            or (position.part_ends_choice and part.finish_reason is None)
        ):
            if (item := await anext(deltas, None)) is None:
                raise no_such_event()
            _, delta = item
            i = delta.index
            ends_choice = delta.finish_reason is not None
            num_new = len(delta.token_ids)
            if (
                self._num_tokens[i] + num_new <= position.num_tokens[i]
                and ends_choice <= position.has_ended[i]
            ):
                self.frames(0, delta)
            elif (
                i == position.choice
                and len(part.token_ids) + num_new <= position.num_part_tokens
                and ends_choice <= position.part_ends_choice
            ):
                part.merge(delta)
            else:
                rest.setdefault(i, Delta(i)).merge(delta)
        if position.choice >= 0:
            out += b"".join(_events(self.frames(0, part))[position.num_events :])
        elif all(self._has_ended):
            self._num_skipped_events = position.num_events
        return out + b"".join([self.frames(0, delta) for delta in rest.values()])


def _events(frames: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in frames.split(b"\n\n")[:-1]]
