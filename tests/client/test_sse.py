"""The SSE parser on every way to cut and to write a stream."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.client import stream as stream_module
from moeserve.client.stream import SSEParser

CASES = {
    "plain": (b"data: one\n\ndata: two\n\n", [b"one", b"two"]),
    "crlf": (b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"]),
    "mixed ends": (b"data: one\r\n\ndata: two\n\r\n", [b"one", b"two"]),
    "comment": (b": ping\n\ndata: one\n: in between\n\n", [b"one"]),
    "several lines": (b"data: a\ndata: b\ndata:\ndata: \n\n", [b"a\nb\n\n"]),
    "no space": (b"data:one\n\n", [b"one"]),
    "only one space is taken": (b"data:  one\n\n", [b" one"]),
    "other fields": (b"event: x\nid: 3\nretry: 10\ndata: one\nfoo\n\n", [b"one"]),
    "field that begins alike": (b"database: x\n\n", []),
    "empty events": (b"\n\n\n\ndata: one\n\n\n\n", [b"one"]),
    "unfinished": (b"data: one\n\ndata: two\n", [b"one"]),
    "utf-8": ("data: \u00e9\U0001f600\n\n".encode(), ["\u00e9\U0001f600".encode()]),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_every_cut_gives_the_same_events(text: bytes, expected: list[bytes]) -> None:
    assert SSEParser().feed(text) == expected
    for cut in range(len(text) + 1):
        parser = SSEParser()
        assert parser.feed(text[:cut]) + parser.feed(text[cut:]) == expected
    parser = SSEParser()
    assert [event for i in range(len(text)) for event in parser.feed(text[i : i + 1])] == expected


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), min_size=1),
        max_size=5,
    ),
    st.sampled_from([b"\n", b"\r\n"]),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_random_events_survive_random_cuts(texts: list[str], end: bytes, cuts: list[int]) -> None:
    stream = b"".join(b"data: " + text.encode() + end * 2 for text in texts)
    bounds = [0, *sorted(min(c, len(stream)) for c in cuts), len(stream)]
    parser = SSEParser()
    events = [e for a, b in itertools.pairwise(bounds) for e in parser.feed(stream[a:b])]
    assert events == [text.encode() for text in texts]


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_EVENT_BYTES", 100)
    parser = SSEParser()
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        parser.feed(b"x" * 10)
