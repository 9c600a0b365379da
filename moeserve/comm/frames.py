"""What travels between the engines of a group: small binary frames, one header and a body of its length.

ROW      leaf -> centre    a vote
MATRIX   centre -> leaf    the votes of all engines, in rank order
RING     centre -> leaf    somebody has voted in this step: vote as well
GONE     both ways         I leave: which ranks are missing, and why
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from moeserve.engine.vote import Vote


class Kind(enum.IntEnum):
    ROW = 1
    MATRIX = 2
    RING = 3
    GONE = 4


_KINDS = {int(kind): kind for kind in Kind}  # quicker than the enum itself
HEADER = struct.Struct("<B3xIq")  # kind, bytes of the body, step
_VOTE = struct.Struct("<qqiiiqqB3x")
VOTE_BYTES = _VOTE.size
MAX_BODY = 1 << 20
_HAS_WORK, _UBATCHES_OK, _PAUSE, _DRAINED, _TRACE = (1 << i for i in range(5))


class Frame(NamedTuple):
    kind: Kind
    step: int
    body: bytes


def frame(kind: Kind, step: int = 0, body: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(body), step) + body


def take_frame(buffer: bytearray) -> Frame | None:
    """Removes the first frame if it is whole. Raises ValueError for bytes that are none of ours."""
    if len(buffer) < HEADER.size:
        return None
    kind, length, step = HEADER.unpack_from(buffer)
    if length > MAX_BODY:
        raise ValueError(f"a frame of {length} bytes; the longest has {MAX_BODY}")
    end = HEADER.size + length
    if len(buffer) < end:
        return None
    body = bytes(buffer[HEADER.size : end])
    del buffer[:end]
    return Frame(_KINDS.get(kind) or Kind(kind), step, body)


def pack_vote(vote: Vote) -> bytes:
    flags = (
        (_HAS_WORK if vote.has_work else 0)
        | (_UBATCHES_OK if vote.ubatches_ok else 0)
        | (_PAUSE if vote.pause else 0)
        | (_DRAINED if vote.drained else 0)
        | (_TRACE if vote.trace else 0)
    )
    numbers = (vote.step, vote.epoch, vote.tokens, vote.split_at, vote.requests, vote.placed, vote.in_force)
    return _VOTE.pack(*numbers, flags)


def unpack_votes(body: bytes) -> list[Vote]:
    """Raises ValueError when the body is not a whole number of votes."""
    if len(body) % VOTE_BYTES:
        raise ValueError(f"{len(body)} bytes are not votes of {VOTE_BYTES} bytes")
    return [
        Vote(
            step,
            epoch,
            (flags & _HAS_WORK) != 0,
            tokens,
            split_at,
            requests,
            (flags & _UBATCHES_OK) != 0,
            (flags & _PAUSE) != 0,
            (flags & _DRAINED) != 0,
            placed,
            in_force,
            (flags & _TRACE) != 0,
        )
        for step, epoch, tokens, split_at, requests, placed, in_force, flags in _VOTE.iter_unpack(body)
    ]


def pack_gone(cause: str, missing: tuple[int, ...]) -> bytes:
    """missing: ranks; at most the first thousand are told."""
    missing = missing[:1000]
    return struct.pack(f"<H{len(missing)}I", len(missing), *missing) + cause.encode()[:2000]


def unpack_gone(body: bytes) -> tuple[str, tuple[int, ...]]:
    """Cause and missing ranks."""
    try:
        (count,) = struct.unpack_from("<H", body)
        missing = struct.unpack_from(f"<{count}I", body, 2)
    except struct.error as error:
        raise ValueError(f"a farewell that cannot be read: {error}") from None
    return body[2 + 4 * count :].decode(errors="replace"), missing
