"""Child processes: watched from birth, restarted, given up on, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moeserve.actor.process import Child, Death, describe_exit, one_line
from moeserve.actor.supervisor import RestartPolicy, Supervisor
from moeserve.errors import ConfigError

Run = Callable[[Coroutine[Any, Any, Any]], Any]

FAST = RestartPolicy(first_pause_s=0.01, max_pause_s=0.05, max_deaths=3, window_s=60, silence_s=10)


def script(body: str) -> list[str]:
    """A child that is tied to its parent, has its document as `document`, and then runs `body`."""
    head = (
        "import os, sys, signal, time, ctypes\nfrom moeserve.actor.guard import adopt\ndocument ="
        " adopt()\n"
    )
    return [sys.executable, "-c", head + textwrap.dedent(body)]


FURTHER = """
from queue import SimpleQueue
from moeserve.actor.guard import adopt
queue = SimpleQueue()
print("got", adopt(queue.put).decode(), flush=True)
while True:
    text = queue.get().decode()
    print("got", text if len(text) < 99 else f"{len(text)} bytes", flush=True)
"""


class Lines(list[str]):
    """Collects a child's log; `seen` waits for a line."""

    def __init__(self) -> None:
        super().__init__()
        self.event = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.append(line)
        self.event.set()

    async def seen(self, text: str, times: int = 1) -> None:
        async with asyncio.timeout(10):
            while sum(text in line for line in self) < times:
                self.event.clear()
                await self.event.wait()


class Keeper(Supervisor):
    """A supervisor whose child is ready once it has logged "ready"."""

    def __init__(
        self, command: list[str], policy: RestartPolicy = FAST, curable: bool = True
    ) -> None:
        super().__init__("worker", policy)
        self.command = command
        self.log = Lines()
        self.notices: list[tuple[Death, float | None]] = []
        self.children: list[Child] = []
        self.told = asyncio.Event()
        self._curable = curable
        self._readiness: set[asyncio.Task[None]] = set()

    async def begin(self, incarnation: int) -> Child:
        child = Child.start("worker", self.command, b"{}", forward=self.log)
        self.children.append(child)
        self._readiness.add(asyncio.create_task(self._until_ready(incarnation)))
        return child

    async def _until_ready(self, incarnation: int) -> None:
        await self.log.seen("ready", incarnation + 1)
        self.note_ready()

    async def is_curable(self, death: Death) -> bool:
        return self._curable

    async def on_death(self, death: Death, restart_in_s: float | None) -> None:
        self.notices.append((death, restart_in_s))
        self.told.set()


def gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie that its parent has not reaped counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pid: int, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while not gone(pid):
        assert time.monotonic() < deadline_s, f"process {pid} still runs after {within_s} s"
        time.sleep(0.01)


# One child


def test_a_death_at_start_is_told_at_once_with_exit_code_and_last_lines(run: Run) -> None:
    async def main() -> None:
        lines = "print(time.monotonic(), flush=True)\nsys.exit('no such model: x')"
        death = await Child.start("engine", script(lines), b"{}", forward=Lines()).death()
        assert time.monotonic() - float(death.log_tail[0]) < 15
        assert (death.name, death.exit_code, death.log_tail[1:]) == (
            "engine",
            1,
            ("no such model: x",),
        )
        assert str(death).startswith(f"engine (pid {death.pid}) exited with code 1 after ")
        assert str(death).endswith("\n    no such model: x")
        assert "its last log lines:" in str(death)

    run(main())


def test_a_child_that_runs_gets_further_documents(run: Run) -> None:
    async def main() -> None:
        command = [sys.executable, "-c", FURTHER]
        log = Lines()
        others = Lines()
        child = Child.start("engine", command, b'"first"', forward=log)
        child.hand_over(b'"second"')  # may arrive together with the first one
        await log.seen("got", times=2)
        child.hand_over(b'"%s"' % (b"x" * 200_000), others)  # more than a pipe holds by itself
        await others.seen("got")
        await child.stop(5.0)
        assert (log, others) == (['got "first"', 'got "second"'], ["got 200002 bytes"])

    run(main())


def test_the_document_arrives_and_is_not_on_the_command_line(run: Run) -> None:
    async def main() -> None:
        log = Lines()
        body = """
        text = document.decode()
        print(text, text in open("/proc/self/cmdline").read(), text in str(os.environ), flush=True)
        """
        await Child.start("engine", script(body), b'{"key":"hunter2"}', forward=log).death()
        assert log == ['{"key":"hunter2"} False False']

    run(main())


def test_a_document_larger_than_a_pipe_arrives_without_blocking_the_loop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        log = Lines()
        document = b'"%s"' % (b"x" * 400_000)
        deaf = Child.start("engine", ["sleep", "1000"], document, forward=log)
        deaf.kill("reads nothing")
        await deaf.death()
        child = Child.start(
            "engine", script("print(len(document), flush=True)"), document, forward=log
        )
        await child.death()
        assert log == ["400002"]
        monkeypatch.delattr("fcntl.F_SETPIPE_SZ")  # as on systems whose pipes cannot grow
        with pytest.raises(ConfigError, match="a start document of 400"):
            Child.start("engine", script("pass"), document, forward=log)

    run(main())


def test_stopping_is_bounded_even_if_the_child_ignores_it(run: Run) -> None:
    async def main() -> None:
        log = Lines()
        polite = Child.start(
            "polite", script("print('up', flush=True); time.sleep(100)"), b"{}", forward=log
        )
        await log.seen("up")
        assert (await polite.stop(5)).exit_code == -signal.SIGTERM

        body = (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
            " time.sleep(100)"
        )
        deaf = Child.start("deaf", script(body), b"{}", forward=log)
        await log.seen("deaf")
        death = await deaf.stop(0.05)
        assert death.exit_code == -signal.SIGKILL
        assert "did not end within 0.05 s of SIGTERM" in str(death)

    run(main())


def test_log_lines_cannot_be_forged_and_are_bounded(run: Run) -> None:
    async def main() -> None:
        log = Lines()
        body = r"""
        os.write(1, b"a\x1b[2Kb\rc\x00\x9b\x7f\td\n" + b"\xff\xfe\n" + b"x" * 100_000 + b"\nlast")
        """
        child = Child.start("engine", script(body), b"{}", forward=log)
        death = await child.death()
        assert log[0] == "a\\x1b[2Kb\\x0dc\\x00\\x9b\\x7f\td"
        assert log[1] == "\\xff\\xfe"
        assert log[-1] == "last"
        assert all(len(line) <= 4096 for line in log)
        assert len(death.log_tail) <= 20

    run(main())


def test_a_grandchild_that_keeps_the_log_open_does_not_delay_the_news(run: Run) -> None:
    async def main() -> None:
        body = (
            "import subprocess; subprocess.Popen(['sleep', '60']); print('bye', flush=True);"
            " os._exit(3)"
        )
        started_s = time.monotonic()
        death = await Child.start("engine", script(body), b"{}", forward=Lines()).death()
        assert (death.exit_code, death.log_tail) == (3, ("bye",))
        assert time.monotonic() - started_s < 15

    run(main())


def test_what_cannot_be_started_is_a_config_error(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"cannot start engine .*/nowhere"):
            Child.start("engine", ["/nowhere/python"], b"{}")

    run(main())


def test_exit_codes_and_lines_in_words() -> None:
    assert describe_exit(0) == "exited with code 0"
    assert describe_exit(-11) == "was killed by SIGSEGV"
    assert describe_exit(-64) == "was killed by SIGRTMAX"
    assert describe_exit(-50) == "was killed by signal 50"
    assert one_line("a\nb\x85\u2028c\r\n") == "a\\x0ab\\x85\\u2028c"


# One after another


def test_a_killed_child_is_started_again_and_its_owner_told(run: Run) -> None:
    async def main() -> None:
        keeper = Keeper(script("print('ready', os.getpid(), flush=True); time.sleep(100)"))
        life = asyncio.ensure_future(keeper.run())
        for round_ in range(1, 3):
            await keeper.log.seen("ready", round_)
            os.kill(keeper.children[-1].pid, signal.SIGKILL)
            await keeper.log.seen("ready", round_ + 1)
        assert [(death.exit_code, pause) for death, pause in keeper.notices] == [
            (-9, 0.01),
            (-9, 0.02),
        ]
        await keeper.stop(term_s=5)
        assert (await life).exit_code == -signal.SIGTERM
        assert keeper.notices[-1][1] is None
        assert all(gone(child.pid) for child in keeper.children)
        assert "memory runs out" in keeper.notices[0][0].summary  # nobody here has killed it
        assert "memory runs out" not in keeper.notices[-1][0].summary

    run(main())


def test_too_many_deaths_mean_giving_up_loudly(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        keeper = Keeper(script("sys.exit('broken')"))
        death = await keeper.run()
        assert death.log_tail == ("broken",)
        assert [pause for _, pause in keeper.notices] == [0.01, 0.02, 0.04, None]

    run(main())
    assert "exited with code 1" in caplog.records[-1].message
    assert "giving up: 4 deaths within 60 s" in caplog.records[-1].message


def test_an_incurable_death_is_final(run: Run) -> None:
    async def main() -> None:
        keeper = Keeper(script("sys.exit(3)"), curable=False)
        assert (await keeper.run()).exit_code == 3
        assert [pause for _, pause in keeper.notices] == [None]

    run(main())


def test_a_child_that_hangs_at_start_is_killed_after_its_silence(run: Run) -> None:
    async def main() -> None:
        keeper = Keeper(script("time.sleep(100)"), RestartPolicy(silence_s=0.3), curable=False)
        death = await keeper.run()
        assert death.exit_code == -signal.SIGKILL
        assert "showed no progress for 0.3 s during start-up" in str(death)
        assert 0.25 <= death.lived_s < 15

    run(main())


def test_signs_of_life_extend_the_start(run: Run) -> None:
    async def main() -> None:
        keeper = Keeper(
            script("time.sleep(0.8); print('ready', flush=True); time.sleep(100)"),
            RestartPolicy(silence_s=0.4),
        )
        life = asyncio.ensure_future(keeper.run())
        while "ready" not in keeper.log:
            keeper.note_progress()
            await asyncio.sleep(0.05)
        await keeper.stop(term_s=5)
        assert (await life).exit_code == -signal.SIGTERM

    run(main())


def test_stopping_between_two_lives_starts_no_other(run: Run) -> None:
    async def main() -> None:
        keeper = Keeper(script("sys.exit(1)"), RestartPolicy(first_pause_s=100))
        life = asyncio.ensure_future(keeper.run())
        await keeper.told.wait()
        await keeper.stop(term_s=1)
        await asyncio.wait_for(life, 15)
        assert len(keeper.children) == 1

    run(main())


def test_a_cancelled_supervisor_leaves_no_child(run: Run) -> None:
    async def main() -> None:
        keeper = Keeper(script("print('ready', flush=True); time.sleep(100)"))
        life = asyncio.ensure_future(keeper.run())
        await keeper.log.seen("ready")
        life.cancel()
        await asyncio.wait([life])
        assert gone(keeper.children[0].pid)

    run(main())


# When the parent dies

PARENT = """
import asyncio, os, sys
from moeserve.actor.process import Child
async def main():
    command = [sys.executable, "-c", sys.argv[1]]
    child = Child.start("child", command, b"{}", forward=lambda line: print(line, flush=True))
    await child.death()
asyncio.run(main())
"""

NO_DEATH_SIGNAL = """
import moeserve.actor.guard as guard
guard.die_with_parent = lambda: None
"""

ORPHANS = {
    "in a native call that holds the GIL": "import ctypes; ctypes.PyDLL(None).sleep(100)",
    "that ignores every signal it can": (
        "import signal\n"
        "for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(s,"
        " signal.SIG_IGN)\n"
        "time.sleep(100)"
    ),
    "without a parent-death signal": "time.sleep(100)",
}


@pytest.mark.parametrize("case", ORPHANS)
def test_no_child_outlives_a_killed_parent(case: str) -> None:
    prelude = NO_DEATH_SIGNAL if "without" in case else ""
    body = (
        f"{prelude}\nimport os, time\nfrom moeserve.actor.guard import"
        " adopt\nadopt()\nprint(os.getpid(), flush=True)\n"
    ) + ORPHANS[case]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, body], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        assert not gone(pid)
        parent.kill()
        wait_until_gone(pid, within_s=3)
    finally:
        parent.wait()
        parent.stdout.close()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_child_whose_parent_died_before_speaking_ends_by_itself() -> None:
    child = subprocess.run(
        script("print('never')"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert child.returncode == 77
    assert child.stdout == ""
    assert "the parent ended before it sent a start document" in child.stderr


def test_a_child_that_was_handed_to_another_parent_meanwhile_ends_by_itself() -> None:
    child = subprocess.run(
        script("print('never')"),
        input='{"parent_pid":1,"document":{}}\n',
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert child.returncode == 77
    assert child.stdout == ""
    assert "the parent ended during start-up" in child.stderr


def test_a_child_that_has_served_for_long_is_replaced_at_once_and_may_die_again(run: Run) -> None:
    async def main() -> None:
        keeper = Keeper(
            script("print('ready', flush=True); time.sleep(100)"),
            RestartPolicy(first_pause_s=5, max_deaths=1, proven_s=0.1),
        )
        life = asyncio.ensure_future(keeper.run())
        for incarnation in range(3):
            await keeper.log.seen("ready", incarnation + 1)
            await asyncio.sleep(0.2)
            keeper.children[-1].kill("is killed by this test")
            await keeper.told.wait()
            keeper.told.clear()
        assert [restart_in_s for _, restart_in_s in keeper.notices] == [0.0, 0.0, 0.0]
        await keeper.stop(1)
        await life

    run(main())
