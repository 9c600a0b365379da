"""Streams whose events have names, as those of /v1/responses and /v1/messages."""

from contextlib import aclosing
from typing import Any

from moeserve.frontend.generation import Delta
from moeserve.server.answer import encode
from moeserve.server.conversation import Conversation
from moeserve.text.answer_format import Part


class EventFrames:
    """An answer that comes into being, and the frames of its stream (see `answer.Frames`).

    A whole answer is made by the same code: streams is False then, and nobody gets the events.
    """

    def __init__(self, chat: Conversation, *, streams: bool) -> None:
        self._chat = chat
        self._streams = streams
        self._frames = bytearray()

    def add(self, parts: list[Part], delta: Delta) -> None:
        """Adds what is new of the answer."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends the answer."""
        raise NotImplementedError

    async def whole(self) -> None:
        """Takes the answer to its end, where nobody streams it. Raises RequestError."""
        async with aclosing(self._chat.running.deltas()) as deltas:
            async for prompt, delta in deltas:
                self.frames(prompt, delta)
        self.finish()

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """Returns the events of a delta."""
        self._chat.counts.add(delta)
        self.add(self._chat.parts(delta), delta)
        return self._taken()

    def _emit(self, event: Any) -> None:
        """Sends an event, a struct with a `type`, as it is now: what it refers to may change later."""
        if self._streams:
            self._frames += b"event: " + event.type.encode() + b"\ndata: " + encode(event) + b"\n\n"

    def _taken(self) -> bytes:
        """Returns what was sent since the last call."""
        frames = bytes(self._frames)
        self._frames = bytearray()
        return frames
