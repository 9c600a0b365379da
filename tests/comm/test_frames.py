"""Frames and votes survive the wire, in whatever pieces they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.comm.frames import (
    HEADER,
    MAX_BODY,
    Frame,
    Kind,
    frame,
    pack_gone,
    pack_vote,
    take_frame,
    unpack_gone,
    unpack_votes,
)
from moeserve.engine.vote import Vote

I64 = st.integers(0, 2**63 - 1)
I32 = st.integers(0, 2**31 - 1)
VOTES = st.builds(
    Vote,
    step=I64,
    epoch=I64,
    has_work=st.booleans(),
    tokens=I32,
    split_at=I32,
    requests=I32,
    ubatches_ok=st.booleans(),
    pause=st.booleans(),
    drained=st.booleans(),
    placed=I64,
    in_force=I64,
    trace=st.booleans(),
)


@given(votes=st.lists(VOTES, max_size=4))
def test_votes_come_back(votes: list[Vote]) -> None:
    assert unpack_votes(b"".join(map(pack_vote, votes))) == votes


@given(data=st.data())
def test_frames_come_back_in_any_pieces(data: st.DataObject) -> None:
    frames = data.draw(st.lists(st.builds(Frame, st.sampled_from(Kind), I64, st.binary(max_size=40)), max_size=5))
    wire = b"".join(frame(one.kind, one.step, one.body) for one in frames)
    splits = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=5)))
    buffer, got = bytearray(), []
    for start, end in zip([0, *splits], [*splits, len(wire)], strict=True):
        buffer += wire[start:end]
        while (one := take_frame(buffer)) is not None:
            got.append(one)
    assert (got, bytes(buffer)) == (frames, b"")


def test_a_farewell_comes_back() -> None:
    assert unpack_gone(pack_gone("engine 1 died", (2, 3))) == ("engine 1 died", (2, 3))
    assert unpack_gone(pack_gone("x" * 9000, tuple(range(5000))))[1] == tuple(range(1000))


@pytest.mark.parametrize("wire", [HEADER.pack(99, 0, 0), HEADER.pack(Kind.ROW, MAX_BODY + 1, 0)])
def test_nonsense_is_refused(wire: bytes) -> None:
    with pytest.raises(ValueError, match=r"99|longest"):
        take_frame(bytearray(wire))


def test_half_a_vote_and_half_a_farewell_are_refused() -> None:
    with pytest.raises(ValueError, match="not votes"):
        unpack_votes(pack_vote(Vote(0, 0))[:-1])
    with pytest.raises(ValueError, match="farewell"):
        unpack_gone(pack_gone("", (1, 2))[:5])
