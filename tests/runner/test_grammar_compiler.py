"""Grammars compile beside the steps: by priority, cancelled if unneeded, and never blocking."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeserve
from moeserve.actor.actor import Inbox
from moeserve.comm.world import World
from moeserve.engine.core import EngineCore
from moeserve.engine.plan import GrammarJob, NewRequest
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import InvalidRequest
from moeserve.messages import Drain, EngineIn, EngineOut, FinishReason, StepOutput, Submit
from moeserve.runner.sampling.constraints import Constraints
from moeserve.runner.sampling.grammar_compiler import GrammarCompiler, failure_of
from moeserve.runner.thread import ThreadedRunner
from moeserve.sampling import GrammarSpec, TokenSampling
from moeserve.text.grammar import Grammars
from moeserve.text.tokenizer import Tokenizer
from tests.runner.engines import runner_of

MODEL = Path(moeserve.__file__).parent / "assets" / "demo"
TOKENIZER = Tokenizer.load(MODEL)
VOCAB = TOKENIZER.backend.get_vocab_size()
END = TOKENIZER.backend.token_to_id("<|im_end|>")
SLOW = GrammarSpec("choice", '["fox", "owl"]')
QUICK = GrammarSpec("regex", "(ab)+")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, special=False)


def job(
    ticket: int, grammar: GrammarSpec = QUICK, priority: int = 0, answer: str = ""
) -> GrammarJob:
    return GrammarJob(ticket, grammar, ids(answer), priority)


class Gate:
    """Holds the compilation of one grammar until the test opens it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: GrammarSpec) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        compile_ = Grammars.compile

        def slow(grammars: Grammars, spec: GrammarSpec) -> Any:
            if spec == held:
                self.reached.set()
                assert self.opened.wait(60)
            return compile_(grammars, spec)

        monkeypatch.setattr(Grammars, "compile", slow)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch, SLOW)


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(MODEL, VOCAB, [END])
    yield made
    made.close()


def test_priority_goes_first_then_the_order_of_tickets(
    gate: Gate, compiler: GrammarCompiler
) -> None:
    first = compiler.start(job(1, SLOW))
    assert gate.reached.wait(60)
    done: list[int] = []
    futures = []
    for ticket, priority in ((2, 5), (3, 0), (4, -1), (5, 0)):
        futures.append(compiler.start(job(ticket, priority=priority)))
        futures[-1].add_done_callback(lambda _, ticket=ticket: done.append(ticket))
    gate.opened.set()
    first.result(60)
    for future in futures:
        future.result(60)
    assert done == [4, 3, 5, 2]


def test_a_matcher_has_had_the_answer_so_far(compiler: GrammarCompiler) -> None:
    matcher = compiler.start(job(1, answer="abab")).result(60)
    assert matcher.num_tokens == len(ids("abab"))
    with pytest.raises(Exception, match="does not allow"):
        compiler.start(job(2, answer="ba")).result(60)


def test_closed_it_ends_with_the_job_in_hand(gate: Gate) -> None:
    compiler = GrammarCompiler(MODEL, VOCAB, [END])
    first = compiler.start(job(1, SLOW))
    second = compiler.start(job(2))
    assert gate.reached.wait(60)
    closing = threading.Thread(target=compiler.close)
    closing.start()
    with pytest.raises(CancelledError):
        second.result(60)
    gate.opened.set()
    closing.join(60)
    assert first.result(0).num_tokens == 0
    with pytest.raises(RuntimeError, match="closed"):
        compiler.start(job(3)).result(0)


def test_what_is_wrong_with_a_grammar_and_what_is_wrong_with_us() -> None:
    assert failure_of(InvalidRequest("bad")) == "structured output: bad"
    assert failure_of(TypeError("x")) == "internal error in structured output: TypeError: x"


def test_a_prepared_grammar_is_used_once_and_again_by_a_step_that_runs_again(gate: Gate) -> None:
    constraints = Constraints(MODEL, VOCAB, [END])
    reports: dict[int, str] = {}
    ready = threading.Event()

    def prepare(ticket: int, grammar: GrammarSpec) -> None:
        def on_done(error: str) -> None:
            reports[ticket] = error
            ready.set()

        constraints.prepare(job(ticket, grammar), on_done)

    try:
        prepare(7, SLOW)
        prepare(8, QUICK)
        assert gate.reached.wait(60)
        constraints.drop([8, 99])
        gate.opened.set()
        assert ready.wait(60)
        sampling = TokenSampling(seed=0, max_tokens=9, grammar=SLOW)
        request = NewRequest(0, np.arange(3, dtype=np.int32), 3, sampling, grammar_ticket=7)
        for _ in range(2):
            constraints.add(request)
            step = constraints.begin([0], [3])
            assert step is not None
            bits = step.result().bits_CW[0].view(np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            assert set(ids("f") + ids("o")) <= set(allowed.tolist())
            assert END not in allowed
            assert step.accept([ids("f")]).failed == {}
        ready.clear()
        prepare(9, GrammarSpec("regex", "("))
        assert ready.wait(60)
        assert set(reports) == {7, 9}, "a job that was dropped makes no report"
        assert reports[7] == ""
        assert reports[9].startswith("structured output: the grammar does not compile")
        assert set(constraints._prepared) == {9}
        constraints.drop([9])
        assert not constraints._prepared
    finally:
        constraints.close()


def submit_of(rid: int, grammar: GrammarSpec | None = None, max_tokens: int = 40) -> Submit:
    tokens = np.array(ids("Once upon a time"), "<i4")
    sampling = TokenSampling(seed=rid, max_tokens=max_tokens, stop_ids=(END,), grammar=grammar)
    return Submit(rid=rid, tokens=tokens.tobytes(), num_prompt=len(tokens), sampling=sampling)


async def test_a_slow_grammar_stalls_no_stream(gate: Gate) -> None:
    """The real model serves two streams, one with a grammar, to their ends while another grammar
    compiles; its request is answered afterwards, by the rules of the grammar."""
    model = runner_of(MODEL, World(), grouped=False)
    runner = ThreadedRunner(model)
    limits = await runner.call(model.prepare)
    texts: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    ended = asyncio.Event()

    def hear(msg: EngineOut) -> None:
        if isinstance(msg, StepOutput):
            rids = np.frombuffer(msg.rids, "<i8").tolist()
            tokens = np.frombuffer(msg.tokens, "<i4").tolist()
            for rid, token, finish in zip(rids, tokens, msg.finish, strict=True):
                texts.setdefault(rid, []).append(token)
                if finish:
                    ends[rid] = FinishReason.NAMES[finish]
                    ended.set()

    async def until(rids: set[int]) -> None:
        async with asyncio.timeout(60):
            while set(ends) != rids:
                await ended.wait()
                ended.clear()

    inbox: Inbox[EngineIn] = Inbox("engine")
    scheduler = Scheduler(limits, model.groups, eos_ids=(END,), vocab_size=model.spec.vocab_size)
    core = EngineCore(scheduler, runner, inbox, hear)
    running = asyncio.create_task(core.run())
    try:
        inbox.put(submit_of(0))
        inbox.put(submit_of(1, SLOW))
        inbox.put(submit_of(2, QUICK, max_tokens=8))
        await asyncio.to_thread(gate.reached.wait, 60)
        await until({0})  # the compiler is busy, so the second grammar has to wait as well
        assert 1 not in texts
        gate.opened.set()
        await until({0, 1, 2})
        assert TOKENIZER.decode(texts[1][:-1] if texts[1][-1] == END else texts[1]) in (
            "fox",
            "owl",
        )
        assert set(TOKENIZER.decode(texts[2])) == {"a", "b"}
    finally:
        gate.opened.set()
        inbox.put(Drain(0.0))
        await asyncio.wait_for(running, 60)
        await asyncio.to_thread(runner.close)
