"""Streams that are resumed or taken over: replays yield to other work and give the same answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from moeserve.cluster.host import Root
from moeserve.errors import NotFound, Overloaded
from moeserve.frontend import journal_feed, resumable, slices
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta, Generation
from moeserve.frontend.journal import Entry, Journal, SequenceLog, StreamLog
from moeserve.frontend.journal_feed import feed, follow
from moeserve.frontend.resumable import ResumedElsewhere
from moeserve.frontend.takeover import succeeding
from moeserve.messages import Abort, FinishReason, StepOutput, Submit
from moeserve.sampling import SamplingParams, TokenSampling
from moeserve.text.tokenizer import Tokenizer

from .conftest import DEMO, ScriptedEngine, ready

STOP = FinishReason.STOP
STORY = "A small fox ran home through the old harbour, and slept."


@pytest.fixture
async def front(engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[FrontEnd]:
    """Keeps its streams for 30 s."""
    front = FrontEnd(
        engine,
        model_name="m",
        model_dir=DEMO,
        tokenizer=tokenizer,
        chat_template=None,
        defaults={},
        max_queued=None,
        resume_window_s=30.0,
    )
    life = asyncio.create_task(front.run())
    await engine.tell(ready(max_model_len=100_000))
    yield front
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)


@pytest.fixture
def always_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 0.0)


def another(id: str, tokens: list[int], **params) -> StreamLog:
    """A stream of another front end."""
    entry = Entry(
        id=id,
        request_id=f"request-{id}",
        created=7,
        digest=b"d",
        owner="",
        prompt=array("i", [5, 6]).tobytes(),
        params=SamplingParams(max_tokens=90_000, **params),
        samplings=[TokenSampling(seed=1, max_tokens=90_000)],
        rids=[1000],
    )
    return StreamLog(entry, [SequenceLog(tokens=tokens)])


async def recorded(front: FrontEnd, engine: ScriptedEngine, **params) -> tuple[Generation, Submit]:
    """A stream that has begun here."""
    generation = await front.generate([5, 6], SamplingParams(seed=3, max_tokens=500, **params))
    front.resumable.make_resumable(generation, id="x", created=7, digest=b"d", owner="")
    (submit,) = engine.take(Submit)
    return generation, submit


async def collect(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def iterations_during(work) -> int:
    """Return how often the event loop iterates until the work is done."""
    task = asyncio.ensure_future(work)
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


async def test_a_takeover_lets_the_loop_turn(front, engine, tokenizer, monkeypatch):
    ids = tokenizer.encode(STORY, special=False)
    tokens = [ids[i % len(ids)] for i in range(1000)]
    streams = [another(str(i), tokens.copy(), stop="zebra") for i in range(4)]
    logs = [front.adopt(stream) for stream in streams]
    for log in logs:
        await front.restart(log)
    submits = engine.take(Submit)
    assert [len(submit.tokens) // 4 for submit in submits] == [1002] * 4  # before any replay
    row_s = slices.SLICE_S / 10  # on a clock that only the rows move, however busy the machine is
    clock = itertools.count()
    monkeypatch.setattr(slices, "monotonic", lambda: next(clock) * row_s)
    turns = await iterations_during(front.resumable.catch_up())
    assert 4 * 1000 / 12 < turns < 4 * 1000 / 5
    assert not any(front.resumable.generation_of(log).must_replay for log in logs)


async def test_streams_taken_over_are_computed_at_once_and_read_later(front, engine, tokenizer):
    ids = tokenizer.encode(STORY, special=False)
    log = front.adopt(another("a", ids[:4]))
    await front.restart(log)
    (submit,) = engine.take(Submit)
    assert list(memoryview(submit.tokens).cast("i")) == [5, 6, *ids[:4]]
    await engine.rows((submit.rid, ids[4], 0))
    reader = await front.resumable.resume(log)
    for token in ids[5:]:
        await engine.rows((submit.rid, token, 0))
    await engine.rows((submit.rid, 2, STOP))
    deltas = await collect(reader)
    assert text_of(deltas) == STORY
    assert [token for delta in deltas for token in delta.token_ids] == [*ids, 2]


@pytest.mark.usefixtures("always_yields")
async def test_a_stop_string_that_the_dead_process_had_not_found_yet_is_found(
    front, engine, tokenizer
):
    ids = tokenizer.encode(STORY, special=False)
    log = front.adopt(another("a", ids.copy(), stop="harbour"))
    await front.restart(log)
    (submit,) = engine.take(Submit)
    await front.resumable.catch_up()
    assert engine.take(Abort) == [Abort([submit.rid])]
    assert not front.running.sequences
    (delta,) = await collect(await front.resumable.resume(log))
    assert (delta.text, delta.stop_reason) == ("A small fox ran home through the old ", "harbour")


@pytest.mark.usefixtures("always_yields")
async def test_rows_that_come_during_a_replay_are_neither_lost_nor_doubled(
    front, engine, tokenizer
):
    ids = tokenizer.encode(STORY * 3, special=False)
    half = len(ids) // 2
    first, submit = await recorded(front, engine)
    await engine.rows(*((submit.rid, token, 0) for token in ids[:half]))
    (log,) = front.resumable.journal.streams.values()
    resuming = asyncio.create_task(front.resumable.resume(log))
    for token in ids[half:-1]:
        await engine.rows((submit.rid, token, 0))
    assert resuming.done()
    await engine.rows((submit.rid, ids[-1], FinishReason.LENGTH))
    deltas = await collect(await resuming)
    assert text_of(deltas) == STORY * 3
    assert [token for delta in deltas for token in delta.token_ids] == ids
    assert deltas[-1].finish_reason == "length"
    with pytest.raises(ResumedElsewhere):
        await collect(first)
    assert log.sequences[0].tokens == ids


async def test_replayed_rows_are_merged_but_not_across_a_cut(front, engine, tokenizer):
    ids = tokenizer.encode(STORY, special=False)
    _, submit = await recorded(front, engine)
    await engine.rows(*((submit.rid, ids[i % len(ids)], 0) for i in range(600)))
    await engine.rows((submit.rid, 2, STOP))
    (log,) = front.resumable.journal.streams.values()
    deltas = await collect(await front.resumable.resume(log, delta_ends={0: {10, 13}}))
    assert [len(delta.token_ids) for delta in deltas] == [10, 3, 256, 256, 76]


@pytest.mark.usefixtures("always_yields")
async def test_the_newest_of_two_replays_wins(front, engine, tokenizer):
    ids = tokenizer.encode(STORY, special=False)
    _, submit = await recorded(front, engine)
    await engine.rows(*((submit.rid, token, 0) for token in ids))
    (log,) = front.resumable.journal.streams.values()
    older = asyncio.create_task(front.resumable.resume(log))
    await asyncio.sleep(0)
    newer = asyncio.create_task(front.resumable.resume(log))
    with pytest.raises(ResumedElsewhere):
        await older
    await engine.rows((submit.rid, 2, STOP))
    assert text_of(await collect(await newer)) == STORY


@pytest.mark.usefixtures("always_yields")
async def test_a_replay_of_a_stream_that_is_closed_meanwhile_ends(front, engine, tokenizer):
    ids = tokenizer.encode(STORY, special=False)
    generation, submit = await recorded(front, engine)
    await engine.rows(*((submit.rid, token, 0) for token in ids))
    (log,) = front.resumable.journal.streams.values()
    resuming = asyncio.create_task(front.resumable.resume(log))
    await asyncio.sleep(0)
    front.drop(generation)
    with pytest.raises(NotFound):
        await resuming
    with pytest.raises(NotFound):
        await front.resumable.resume(log)
    assert not front.resumable._num_replay_tokens


@pytest.mark.usefixtures("always_yields")
async def test_replays_are_bounded(front, engine, tokenizer, monkeypatch):
    ids = tokenizer.encode(STORY, special=False)
    monkeypatch.setattr(resumable, "MAX_REPLAY_TOKENS", len(ids) + 1)
    logs = [front.adopt(another(id, ids.copy())) for id in "ab"]
    first = asyncio.create_task(front.resumable.resume(logs[0]))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await front.resumable.resume(logs[1])
    assert caught.value.retry_after_s
    await first
    await front.resumable.resume(logs[1])


async def test_streams_without_a_reader_are_closed_when_they_grow_beyond_the_bound(front, engine):
    front.resumable.journal._max_bytes = 20_000
    logs = []
    submits = []
    for id in "ab":
        logs.append(front.adopt(another(id, [5] * 100)))
        await front.restart(logs[-1])
        submits += engine.take(Submit)
    for _ in range(500):
        if engine.take(Abort):
            break
        await engine.rows(*((submit.rid, 5, 0) for submit in submits))
    assert [front.resumable.generation_of(log) is None for log in logs] == [True, False]
    assert front.resumable.journal.unread_bytes <= 20_000
    assert len(front.running.sequences) == 1


async def test_a_stream_that_nobody_resumes_is_closed_after_the_window(front, engine):
    front.resumable.window_s = 0.01
    log = front.adopt(another("a", [5, 6]))
    await front.restart(log)
    await asyncio.sleep(0.05)
    assert front.resumable.generation_of(log) is None
    assert engine.take(Abort)


async def test_a_replay_that_fails_costs_only_its_stream(
    front, engine, tokenizer, monkeypatch, caplog
):
    ids = tokenizer.encode(STORY, special=False)
    logs = [front.adopt(another(id, ids.copy(), stop="zebra")) for id in "ab"]
    for log in logs:
        await front.restart(log)
    failing = front.resumable._replay

    async def fails_once(stream):
        if stream.log is logs[0]:
            raise ZeroDivisionError("planted")
        return await failing(stream)

    monkeypatch.setattr(front.resumable, "_replay", fails_once)
    await front.resumable.catch_up()
    assert "planted" in caplog.text
    assert [front.resumable.generation_of(log) is None for log in logs] == [True, False]


def roots(folder: Path) -> tuple[Root, Root]:
    """Return the root of a serving front end, and that of a standby that follows it."""
    folder.chmod(0o700)
    shared = {"made_at": 1, "folder": str(folder), "address": "", "token": "", "secret": "s"}
    return Root(number=0, follows=-1, **shared), Root(number=1, follows=0, **shared)


@pytest.mark.usefixtures("always_yields")
async def test_the_feed_gives_all_streams_while_rows_come_and_outlives_an_error(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    serving, following = roots(tmp_path)
    rids = range(40)
    journal = Journal()
    for rid in rids:
        stream = another(str(rid), [rid])
        journal.open(msgspec.structs.replace(stream.entry, rids=[rid]), stream.sequences)
    listen = journal_feed.listen
    planted = iter([ZeroDivisionError("planted")])

    def fails_once(*args, **options):
        for error in planted:
            raise error
        return listen(*args, **options)

    monkeypatch.setattr(journal_feed, "listen", fails_once)
    ours = asyncio.Event()
    feeding = asyncio.create_task(feed(journal, serving, slices.Slices()))
    copying = asyncio.create_task(follow(following, ours))
    fed = 0
    while "a standby front end is connected" not in caplog.text or fed < 30:
        fed += journal.listener is not None
        token = 100 + fed
        out = StepOutput(
            rids=array("q", rids).tobytes(),
            tokens=array("i", [token] * 40).tobytes(),
            finish=bytes(40),
        )
        journal.add_rows(out)
        for stream in journal.streams.values():
            stream.sequences[0].tokens.append(token)
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    ours.set()
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    copy = await asyncio.wait_for(copying, 20)
    assert "planted" in caplog.text
    assert {id: stream.sequences for id, stream in copy.streams.items()} == {
        id: stream.sequences for id, stream in journal.streams.items()
    }


async def test_a_failed_feed_or_takeover_is_reported(
    front, tmp_path, tokenizer, monkeypatch, caplog
):
    async def fails(*args: object) -> None:
        raise ZeroDivisionError("planted in the takeover")

    monkeypatch.setattr(resumable.ResumableStreams, "catch_up", fails)

    class Opened:
        async def __aenter__(self) -> FrontEnd:
            return front

        async def __aexit__(self, *exc: object) -> None: ...

    root, _ = roots(tmp_path)
    ids = tokenizer.encode(STORY, special=False)
    async with succeeding(Opened(), [another("a", ids.copy())], root) as it:
        assert list(it.resumable.journal.streams) == ["a"]
        await asyncio.sleep(0.01)
        assert "planted in the takeover" in caplog.text
        assert it.running.sequences
