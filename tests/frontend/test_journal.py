"""The journal of resumable streams: what it keeps, that a copy kept by its feed is equal, and its
bounds.
"""

from __future__ import annotations

from array import array

import msgspec

from moeserve.frontend.journal import Change, Closed, Entry, Journal, Known, Opened
from moeserve.messages import FinishReason, Logprobs, StepOutput, StepRecord
from moeserve.sampling import SamplingParams, TokenSampling

decode = msgspec.msgpack.Decoder(Change).decode


def entry(id: str, *rids: int, prompt: int = 2) -> Entry:
    return Entry(
        id=id, request_id=f"request-{id}", created=7, digest=b"d", owner="", prompt=array("i", range(prompt)).tobytes(),
        params=SamplingParams(n=len(rids)), samplings=[TokenSampling(seed=rid, max_tokens=9) for rid in rids],
        rids=list(rids),
    )  # fmt: skip


def step(*rows: tuple[int, int, int], **columns) -> StepOutput:
    rids, tokens, finish = zip(*rows, strict=True)
    columns["rids"], columns["tokens"] = array("q", rids).tobytes(), array("i", tokens).tobytes()
    record = StepRecord(
        step=1,
        num_tokens=1,
        num_requests=1,
        num_running=1,
        num_waiting=0,
        num_free_blocks=1,
        num_blocks=9,
    )
    return StepOutput(finish=bytes(finish), record=record, **columns)


def pair() -> tuple[Journal, Journal]:
    """A journal and one that follows it over a wire."""
    first = Journal(30)
    second = Journal(30)
    first.listener = lambda change: second.apply(decode(msgspec.msgpack.encode(change)))
    return first, second


def applied(journal: Journal, out: StepOutput) -> None:
    """What a front end does with a step: the journal notes it, and the rows' tokens are added to
    its sequences.
    """
    journal.step(out)
    for rid, token in zip(
        memoryview(out.rids).cast("q"), memoryview(out.tokens).cast("i"), strict=True
    ):
        if token >= 0 and rid in journal._known:
            journal._known[rid].tokens.append(token)


def test_a_journal_that_follows_another_over_a_wire_is_equal():
    first, second = pair()
    rows = [Logprobs([5, 6], [-0.5, -1.5], 1), Logprobs([7, 6], [-0.25, -2.0], 1)]
    first.open(entry("a", 1, 2), [Known(), Known()])
    first.open(entry("b", 3), [Known(tokens=[4])])
    applied(
        first,
        step(
            (1, 5, 0),
            (1, 7, 0),
            (3, 8, 0),
            (99, 8, 0),
            logprobs={1: rows},
            drafts={1: (1, 1)},
            cached={1: 16, 3: 16},
        ),
    )
    applied(first, step((1, 9, FinishReason.STOP), (2, 5, 0), stop_ids={1: 9}, digests={1: [b"x"]}))
    first.open(entry("c", 4), [Known()])
    first.close("c")
    assert second.snapshot() == first.snapshot()
    one = second.streams["a"].known[0]
    assert (one.tokens, one.logprobs, one.drafts, one.cached) == ([5, 7, 9], rows, {0: (1, 1)}, 16)
    assert (one.finish, one.stop_id, one.digests) == (FinishReason.STOP, 9, [b"x"])
    assert second.streams["b"].known[0] == Known(
        tokens=[4, 8]
    )  # its cached tokens were its own earlier ones
    late = Journal(30)
    for opened in first.snapshot():
        late.apply(decode(msgspec.msgpack.encode(opened)))
    assert late.snapshot() == first.snapshot()


def test_rows_are_those_that_the_engine_sent():
    known = Known(
        tokens=[5, 7],
        logprobs=[Logprobs([5], [-1.0], 1), Logprobs([7], [-2.0], 1)],
        drafts={1: (2, 1)},
        cached=16,
    )
    known.finish = FinishReason.STOP
    known.stop_id = 7
    (first, none, columns), (second, finish, last) = known.rows(3)
    assert (first, none, columns.logprobs, columns.cached) == (
        5,
        0,
        {3: [Logprobs([5], [-1.0], 1)]},
        {3: 16},
    )
    assert (second, finish, last.drafts, last.stop_ids) == (
        7,
        FinishReason.STOP,
        {3: (2, 1)},
        {3: 7},
    )
    aborted = Known(tokens=[5], finish=FinishReason.ABORT)
    assert [row[:2] for row in aborted.rows(3)] == [(5, 0), (-1, FinishReason.ABORT)]


def test_steps_of_others_are_not_fed_without_a_stream_to_keep():
    journal = Journal(30)
    told = []
    journal.listener = told.append
    journal.step(step((1, 5, 0)))
    assert told == []
    journal.open(entry("a", 1), [Known()])
    journal.step(step((1, 5, 0)))
    journal.close("a")
    journal.close("a")
    assert [type(change) for change in told] == [Opened, StepOutput, Closed]
    assert told[1].record is None


def test_count_bounds_the_streams_and_bytes_those_that_nobody_reads():
    journal = Journal(30, max_count=3, max_bytes=1000)
    a, b, c = [
        journal.open(entry(id, rid), [Known(tokens=[1] * 10)]) for rid, id in enumerate("abc")
    ]
    assert journal.open(entry("d", 9), [Known()]) is None
    assert journal.leave(b) == [b]  # there is no room for the next one
    journal.close("b")
    assert [journal.leave(a), journal.leave(c)] == [[], []]
    c.known[0].tokens += [1] * 15
    journal.resume("c")
    assert journal.leave(c) == [a]
    journal.close("a")
    assert list(journal.streams) == ["c"]
    journal.open(entry("c", 2, 3), [Known(), Known()])  # as after a takeover
    assert journal.streams["c"].entry.rids == [2, 3]
    assert set(journal._known) == {2, 3}
