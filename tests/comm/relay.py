"""A man in the middle between two ranks, who reads their frames and may alter them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

from moeserve.comm.cipher import SEALED_HEADER

UP = "to the listener"
DOWN = "to the connector"
# Bytes of the handshake: hello and proof; nonce with proof, and acceptance.
_GREETING = {UP: (40, 32), DOWN: (48, 1)}
Alter = Callable[[str, list[bytes]], Sequence[bytes]]


def untouched(way: str, frames: list[bytes]) -> Sequence[bytes]:
    return frames[-1:]


class Relay:
    """Forwards connections from `address` to a listener at `target`.

    `alter` gets the direction and all its frames so far, and returns the frames to forward in place
    of the newest.
    """

    def __init__(self, target: str, alter: Alter = untouched) -> None:
        self._target = target
        self.alter = alter
        self.seen: list[bytes] = []
        self._server: asyncio.Server

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        for _ in count():
            try:
                their_reader, their_writer = await asyncio.open_connection(host, int(port))
                break
            except OSError:  # the target does not listen yet
                await asyncio.sleep(0.005)
        await asyncio.gather(
            self._pass(UP, reader, their_writer), self._pass(DOWN, their_reader, writer)
        )

    async def _pass(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        frames: list[bytes] = []
        try:
            for num_bytes in _GREETING[way]:
                writer.write(await reader.readexactly(num_bytes))
            while True:
                head = await reader.readexactly(SEALED_HEADER.size)
                frames.append(head + await reader.readexactly(SEALED_HEADER.unpack(head)[0]))
                self.seen.append(frames[-1])
                writer.writelines(self.alter(way, frames))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


def flipped(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


def shortened(frame: bytes) -> bytes:
    num_bytes, code = SEALED_HEADER.unpack_from(frame)
    return SEALED_HEADER.pack(num_bytes - 1, code) + frame[SEALED_HEADER.size : -1]


# Attacks: from all frames so far to the frames to forward.
FORGERIES: dict[str, Callable[[list[bytes]], Sequence[bytes]]] = {
    "a bit is flipped": lambda frames: [flipped(frames[-1])],
    "a part is cut off": lambda frames: [shortened(frames[-1])],
    "it is said to be longer": lambda frames: [bytes([frames[-1][0] ^ 128]) + frames[-1][1:]],
    "it comes twice": lambda frames: [frames[-1], frames[-1]],
    "an older one instead": lambda frames: [frames[0]],
    "one is put in": lambda frames: [SEALED_HEADER.pack(20, 0) + bytes(20), frames[-1]],
}


def once(forgery: str, way: str, number: int) -> Alter:
    """Return a forgery of only the `number`th frame of a direction."""

    def alter(at: str, frames: list[bytes]) -> Sequence[bytes]:
        return FORGERIES[forgery](frames) if (at, len(frames)) == (way, number) else frames[-1:]

    return alter
