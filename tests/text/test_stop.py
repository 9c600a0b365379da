"""Stop strings against a naive search over the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.text.stop import StopMatcher


def naive(text: str, stops: list[str], include: bool, inert: int) -> tuple[str, str | None]:
    for end in range(inert + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def streamed(
    pieces: list[str], stops: list[str], include: bool, num_inert: int
) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include)
    given_out = ""
    for i, piece in enumerate(pieces):
        text, found = matcher.push(piece, active=i >= num_inert)
        given_out += text
        if found is not None:
            return given_out, found
    return given_out + matcher.flush(), None


letters = st.text("ab", min_size=1, max_size=5)


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=25),
    stops=st.lists(letters, max_size=4),
    include=st.booleans(),
    num_inert=st.integers(0, 6),
)
@settings(max_examples=700, deadline=None)
def test_streamed_is_what_a_naive_search_finds(pieces, stops, include, num_inert):
    inert = sum(map(len, pieces[:num_inert]))
    assert streamed(pieces, stops, include, num_inert) == naive(
        "".join(pieces), stops, include, inert
    )


def test_only_what_may_become_a_stop_string_is_held_back():
    matcher = StopMatcher(["END", "\n\n"])
    assert matcher.push("hello E") == ("hello ", None)
    assert matcher.push("x\n") == ("Ex", None)
    assert matcher.push("E") == ("\n", None)
    assert matcher.push("ND of it") == ("", "END")


def test_the_earliest_end_wins_and_list_order_breaks_ties():
    assert StopMatcher(["bcd", "c"]).push("abcd") == ("ab", "c")
    assert StopMatcher(["abc", "c", "bc"]).push("xabc") == ("x", "abc")
    assert StopMatcher(["c", "abc"]).push("xabc") == ("xab", "c")


def test_a_long_repetitive_text_stays_cheap():
    matcher = StopMatcher(["a" * 255 + "b"] * 16)
    out = "".join(matcher.push("a")[0] for _ in range(3000)) + matcher.flush()
    assert out == "a" * 3000
