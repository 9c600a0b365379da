"""Sandboxes: a killed one fails no request, input that kills one is rejected, slow work delays no
other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from moeserve.errors import ConfigError, InvalidRequest, Overloaded
from moeserve.sampling import GrammarSpec
from moeserve.text import sandbox_pool
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.grammar_check import GrammarChecker
from moeserve.text.sandbox_pool import SandboxPool
from moeserve.text.sandbox_process import SandboxDied, SandboxProcess

USER = [{"role": "user", "content": "hi"}]
SLOW = "{% for i in range(NUM) %}{% for j in range(1000) %}{% endfor %}{% endfor %}done"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def pool():
    made = SandboxPool("moeserve.text.template_sandbox", "20", purpose="chat templates", size=2)
    yield made
    made.close()


@pytest.fixture
def starts(monkeypatch):
    """The processes that start during the test."""
    pids = []
    start = SandboxProcess._start

    def noted(self):
        start(self)
        pids.append(self.pid)

    monkeypatch.setattr(SandboxProcess, "_start", noted)
    return pids


def kill_when_busy(pids: list[int], count: int, after_s: float = 0.2) -> threading.Thread:
    """Kill the first `count` processes of a list once each has worked for a while."""

    def work():
        for i in range(count):
            while len(pids) <= i:
                time.sleep(0.01)
            time.sleep(after_s)
            os.kill(pids[i], signal.SIGKILL)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def slow_template(pool: SandboxPool, loops: int = 6000) -> ChatTemplate:
    """A template that is quick at load and takes 0.2 to 1 s to render `slow`."""
    body = SLOW.replace("NUM", str(loops))
    source = "{% if messages[0].content == 'slow' %}" + body + "{% else %}quick{% endif %}"
    return ChatTemplate(source, sandboxes=pool)


def test_a_killed_process_costs_no_request(byte_level, pool, starts):
    template = slow_template(pool)
    killer = kill_when_busy(starts, 1, after_s=0.05)
    text = template.render(byte_level, [{"role": "user", "content": "slow"}])
    killer.join()
    assert text == "done"
    assert len(starts) == 2


def test_input_that_meets_two_kills_is_refused(byte_level, pool, starts):
    template = slow_template(pool, loops=50_000)
    killer = kill_when_busy(starts, 2)
    with pytest.raises(InvalidRequest, match="it killed the process that works on it"):
        template.render(byte_level, [{"role": "user", "content": "slow"}])
    killer.join()
    assert len(starts) == 2


@pytest.mark.parametrize(
    ("source", "why"),
    [(ENDLESS, "took too long"), ("{{ 'a' * 10000000000 }}", "needed too much memory")],
)
def test_a_limit_of_its_own_is_met_once(byte_level, starts, source, why):
    pool = SandboxPool("moeserve.text.template_sandbox", "0.3", purpose="x", size=1)
    template = ChatTemplate(
        "{% if messages[0].content == 'x' %}" + source + "{% endif %}", sandboxes=pool
    )
    with pytest.raises(InvalidRequest, match=why):
        template.render(byte_level, [{"role": "user", "content": "x"}])
    assert len(starts) == 1
    pool.close()


def test_a_killed_process_refuses_no_grammar(byte_level, starts):
    checker = GrammarChecker(byte_level, 1000, [0])
    process = checker._sandboxes._processes[0]
    send = process._send

    def killed_at_first(line):
        if line.startswith(b'"') and len(starts) == 1:
            os.kill(process.pid, signal.SIGKILL)  # while the line is on its way
        send(line)

    process._send = killed_at_first
    checker.check(GrammarSpec("regex", "a+"), "x")
    assert len(starts) == 2
    with pytest.raises(InvalidRequest, match="too large or nested"):
        checker.check(GrammarSpec("lark", chain(2400)), "x")
    assert len(starts) == 2  # a stack overflow is the grammar's own fault
    checker.close()


async def test_grammars_that_kill_the_process_delay_their_owner_alone(byte_level):
    checker = GrammarChecker(byte_level, 1000, [0])
    done = []

    async def check(spec, owner):
        with suppress(InvalidRequest, Overloaded):
            await checker.check_async(spec, "x", owner)
        done.append(owner)

    hostile = [GrammarSpec("lark", chain(2400 + i)) for i in range(12)]
    usual = [GrammarSpec("regex", text) for text in ("a", "b")]
    async with asyncio.TaskGroup() as group:
        for spec in hostile:
            group.create_task(check(spec, "hostile"))
        await asyncio.sleep(0.05)
        for spec in usual:
            group.create_task(check(spec, "usual"))
    assert "usual" not in done[-6:]
    checker.close()


def chain(length: int) -> str:
    rules = "\n".join(f"a{i}: a{i + 1}" for i in range(length))
    return f'start: a0\n{rules}\na{length}: "a"'


def test_a_process_that_does_not_start_is_not_the_inputs_fault():
    process = SandboxProcess("moeserve.no_such_module")
    with pytest.raises(ConfigError, match=r"python -m moeserve.no_such_module: .*exit code 1"):
        process.ask(b"x")


def test_input_on_which_the_process_exits_is_refused():
    process = SandboxProcess("moeserve.text.template_sandbox", "1")
    with pytest.raises(SandboxDied, match="exit code 1"):
        process.ask(b"no JSON")
    process.stop()
    process.close()


async def test_slow_renders_starve_nobody_else(byte_level, pool):
    template = slow_template(pool, loops=3000)
    slow = [{"role": "user", "content": "slow"}]
    renders = [asyncio.ensure_future(template.render_async(byte_level, slow)) for _ in range(40)]
    await asyncio.sleep(0.1)
    started = time.perf_counter()
    for _ in range(20):
        await asyncio.to_thread(byte_level.encode, "a text " * 20)  # what other requests need
    assert time.perf_counter() - started < 1
    assert not all(render.done() for render in renders)
    for render in renders:
        render.cancel()


async def test_owners_take_turns():
    pool = SandboxPool("unused", purpose="x", size=1)
    gate = threading.Event()
    order = []

    def first(_):
        gate.wait()

    blocked = pool.submit(first, "a")
    jobs = [pool.submit(lambda _, i=i: order.append(f"a{i}"), "a") for i in range(3)]
    jobs += [pool.submit(lambda _, i=i: order.append(f"b{i}"), "b") for i in range(2)]
    jobs.append(pool.submit(lambda _: order.append("c0"), "c"))
    gate.set()
    for job in [blocked, *jobs]:
        job.result(5)
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2"]
    pool.close()


async def test_waiting_is_bounded_and_can_be_given_up(monkeypatch):
    monkeypatch.setattr(sandbox_pool, "MAX_WAIT_S", 0.05)
    pool = SandboxPool("unused", purpose="new grammars", size=1)
    gate = threading.Event()
    ran = []
    blocked = pool.submit(lambda _: gate.wait())
    with pytest.raises(Overloaded, match="new grammars were busy") as caught:
        await pool.run(lambda _: ran.append("refused"))
    assert caught.value.retry_after_s > 0
    left = asyncio.ensure_future(pool.run(lambda _: ran.append("left")))
    await asyncio.sleep(0.01)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    waiting = asyncio.ensure_future(pool.run(lambda _: ran.append("last")))
    await asyncio.sleep(0)
    gate.set()
    await waiting
    assert blocked.result(5)
    assert ran == ["last"]
    pool.close()


async def test_work_that_has_begun_may_take_longer_than_the_wait(monkeypatch):
    monkeypatch.setattr(sandbox_pool, "MAX_WAIT_S", 0.05)
    pool = SandboxPool("unused", purpose="x", size=1)
    assert await pool.run(lambda _: time.sleep(0.2) or "done") == "done"
    pool.close()


def test_closing_ends_processes_threads_and_what_waits(byte_level, starts):
    pool = SandboxPool("moeserve.text.template_sandbox", "20", purpose="closing", size=1)
    template = slow_template(pool, loops=90_000)
    slow = [{"role": "user", "content": "slow"}]
    results = []

    def render():
        try:
            results.append(template.render(byte_level, slow))
        except BaseException as error:
            results.append(type(error).__name__)

    threads = [threading.Thread(target=render) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    pool.close()
    for thread in threads:
        thread.join(5)
    assert sorted(results) == ["CancelledError", "CancelledError", "InvalidRequest"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("closing")]
    for pid in starts:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    pool.close()
