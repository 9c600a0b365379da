"""The journal of resumable streams: its contents, its copy in another process, and its bounds."""

from __future__ import annotations

from array import array

import msgspec

from moeserve.frontend.journal import (
    TOKEN_BYTES,
    Change,
    Closed,
    Entry,
    Journal,
    Opened,
    SequenceLog,
)
from moeserve.messages import FinishReason, Logprobs, StepOutput, StepRecord
from moeserve.sampling import SamplingParams, TokenSampling

decode = msgspec.msgpack.Decoder(Change).decode


def entry(id: str, *rids: int, prompt: int = 2) -> Entry:
    return Entry(
        id=id,
        request_id=f"request-{id}",
        created=7,
        digest=b"d",
        owner="",
        prompt=array("i", range(prompt)).tobytes(),
        params=SamplingParams(n=len(rids)),
        samplings=[TokenSampling(seed=rid, max_tokens=9) for rid in rids],
        rids=list(rids),
    )


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
    first = Journal()
    second = Journal()
    first.listener = lambda change: second.apply(decode(msgspec.msgpack.encode(change)))
    return first, second


def contents(journal: Journal) -> list[Opened]:
    return [Opened(stream.entry, stream.sequences) for stream in journal.streams.values()]


def applied(journal: Journal, out: StepOutput) -> None:
    """Process a step as a front end does: record it in the journal, then extend the sequences."""
    journal.add_rows(out)
    for rid, token in zip(
        memoryview(out.rids).cast("q"), memoryview(out.tokens).cast("i"), strict=True
    ):
        if token >= 0 and rid in journal._logs:
            journal._logs[rid].tokens.append(token)


def test_a_journal_that_follows_another_over_a_wire_is_equal():
    first, second = pair()
    rows = [Logprobs([5, 6], [-0.5, -1.5], 1), Logprobs([7, 6], [-0.25, -2.0], 1)]
    first.open(entry("a", 1, 2), [SequenceLog(), SequenceLog()])
    first.open(entry("b", 3), [SequenceLog(tokens=[4])])
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
    first.open(entry("c", 4), [SequenceLog()])
    first.close("c")
    assert contents(second) == contents(first)
    one = second.streams["a"].sequences[0]
    assert (one.tokens, one.logprobs, one.drafts, one.cached) == ([5, 7, 9], rows, {0: (1, 1)}, 16)
    assert (one.finish, one.stop_id, one.digests) == (FinishReason.STOP, 9, [b"x"])
    assert second.streams["b"].sequences[0] == SequenceLog(
        tokens=[4, 8]
    )  # its cached tokens were its own earlier ones
    late = Journal()
    for stream in first.streams.values():
        opened = Opened(stream.entry, stream.sequences)
        late.apply(decode(msgspec.msgpack.encode(opened)))
    assert contents(late) == contents(first)


def test_rows_are_those_that_the_engine_sent():
    known = SequenceLog(
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
    aborted = SequenceLog(tokens=[5], finish=FinishReason.ABORT)
    assert [row[:2] for row in aborted.rows(3)] == [(5, 0), (-1, FinishReason.ABORT)]


def test_steps_of_others_are_not_fed_without_a_stream_to_keep():
    journal = Journal()
    told = []
    journal.listener = told.append
    journal.add_rows(step((1, 5, 0)))
    assert told == []
    journal.open(entry("a", 1), [SequenceLog()])
    journal.add_rows(step((1, 5, 0)))
    journal.close("a")
    journal.close("a")
    assert [type(change) for change in told] == [Opened, StepOutput, Closed]
    assert told[1].record is None


def test_count_bounds_the_streams_and_bytes_those_that_nobody_reads():
    journal = Journal(max_count=3, max_bytes=20 * TOKEN_BYTES)
    for rid, id in enumerate("abc"):
        journal.open(entry(id, rid), [SequenceLog(tokens=[1] * 6)])  # of 6 + 2 tokens
    assert journal.open(entry("d", 9), [SequenceLog()]) is None
    journal.mark_unread("b")
    assert journal.ids_to_close() == ["b"]  # there is no room for the next one
    journal.close("b")
    journal.mark_unread("a")
    journal.mark_unread("c")
    assert journal.ids_to_close() == []
    journal.mark_read("c")
    journal.streams["c"].sequences[0].tokens += [1] * 5
    assert journal.ids_to_close() == []
    journal.mark_unread("c")
    assert journal.ids_to_close() == ["a"]
    journal.close("a")
    assert list(journal.streams) == ["c"]
    journal.open(entry("c", 2, 3), [SequenceLog(), SequenceLog()])  # as after a takeover
    assert journal.streams["c"].entry.rids == [2, 3]
    assert set(journal._logs) == {2, 3}
    assert journal.unread_bytes == 0


def test_what_comes_while_nobody_reads_counts_too():
    journal = Journal(max_bytes=24 * TOKEN_BYTES)
    for rid, id in enumerate("abc"):
        journal.open(entry(id, rid), [SequenceLog(tokens=[1] * 4)])
    journal.mark_unread("a")
    journal.mark_unread("b")
    for _ in range(6):
        assert journal.ids_to_close() == []
        applied(journal, step((0, 5, 0), (1, 5, 0), (2, 5, 0)))
    assert journal.unread_bytes == 24 * TOKEN_BYTES
    applied(journal, step((0, 5, 0)))
    assert journal.ids_to_close() == ["a"]
    journal.mark_read("a")
    assert journal.unread_bytes == 12 * TOKEN_BYTES
    journal.mark_unread("a")  # what is counted row by row is what is counted at once
    assert journal.unread_bytes == 25 * TOKEN_BYTES
    rows = [Logprobs([5, 6, 7], [-0.5, -1.5, -2.0], 1)]
    before = journal.unread_bytes
    applied(journal, step((1, 5, 0), logprobs={1: rows}, digests={1: [b"x" * 32]}))
    grown = journal.unread_bytes - before
    journal.mark_unread("b")
    assert journal.unread_bytes == before + grown


def test_rows_that_come_while_they_are_read_are_read_too():
    log = SequenceLog(tokens=[5])
    rows = log.rows(1)
    assert next(rows)[:2] == (5, FinishReason.NONE)
    log.tokens.append(6)
    log.finish = FinishReason.LENGTH
    assert [row[:2] for row in rows] == [(6, FinishReason.LENGTH)]
    assert [row[0] for row in log.rows(1, start=1)] == [6]
