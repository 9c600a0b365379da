"""A tensor-parallel worker: a rank of an engine other than its leader.

The leader is tp_rank 0, which has the scheduler. A worker is a fork of the leader or started by it.
It executes the plans that the leader sends, and samples the same tokens, but only the leader
reports them. If another rank is lost, the worker ends its step and waits for the next Join. Exit
codes are as in engine_main.py.
"""

import logging
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from moeserve.actor import guard
from moeserve.actor.forking import fork_child
from moeserve.actor.process import Forked, close_pipes
from moeserve.cluster.logs import set_up_logging
from moeserve.cluster.rank import make_rank
from moeserve.errors import ConfigError, PeerLost
from moeserve.messages import Join
from moeserve.runner import commands
from moeserve.runner.job_thread import JobThread

if TYPE_CHECKING:
    from moeserve.comm.stream import BlockingStream
    from moeserve.runner.base import ModelRunnerBase

log = logging.getLogger("moeserve.cluster.tp_worker")

WORKER = "moeserve.cluster.tp_worker"

INTERRUPT_INTERVAL_S = 0.1  # between two attempts to interrupt a step
POLL_INTERVAL_S = 0.02  # between two checks of a placement that is being prepared

_forked: list[Forked] = []  # forked workers that wait for their `WorkerBirth`


def fork_workers(number: int) -> None:
    """Fork `number` workers. This process must have only one thread."""
    for _ in range(number):
        worker = fork_child()
        if worker is None:  # this is the worker, and `main` does not return
            for sibling in _forked:
                close_pipes(sibling)
            Path("/proc/self/comm").write_text("moeserve-worker", "ascii")
            main()
        else:
            _forked.append(worker)


def take_forked() -> list[Forked]:
    """Return the workers that `fork_workers` made, for a `Team`, and forget them."""
    workers = _forked[:]
    _forked.clear()
    return workers


def main() -> None:
    """Run a worker until its leader closes the connection, and end the process."""
    # These signals reach whole process groups, but the front end decides what to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    birth = msgspec.json.decode(guard.adopt(), type=commands.WorkerBirth)
    set_up_logging(birth.log_level, birth.log_format)
    Worker(birth.tp_rank, commands.connect_to_leader(birth)).serve()
    guard.end_process(0)


def _import() -> None:
    """Do the slow imports in the runner's thread, at the same time as the leader."""
    import moeserve.runner.cpu
    import moeserve.runner.factory  # noqa: F401


class Worker:
    """Executes the leader's commands.

    Most commands run one after the other in the runner's thread. `Leave` and those about grammars
    take effect at once, in the thread that reads commands.
    """

    def __init__(self, tp_rank: int, stream: "BlockingStream[commands.WorkerCommand]") -> None:
        self._tp_rank = tp_rank
        self._stream = stream
        self._thread = JobThread("model runner", _import)
        self._runner: ModelRunnerBase | None = None
        self._lost: PeerLost | None = None  # set from the loss of a rank to the next Join

    def serve(self) -> None:
        """Execute commands until the leader closes the connection."""
        while (command := self._stream.receive()) is not None:
            match command.what:
                case commands.PrepareGrammar() | commands.DropGrammars():
                    self._act_on_grammars(command)  # without waiting for the running step
                    continue
                case commands.Leave():
                    self._leave()
            self._thread.do(lambda command=command: self._answer(command))  # type: ignore[misc]

    def _answer(self, command: commands.WorkerCommand) -> None:
        """Execute a command and send the result. Draft tokens are proposed after that."""
        try:
            done = self._execute(command)
        except PeerLost as exc:
            self._lost = exc
            done = commands.CommandDone(
                command.seq, lost=str(exc) or "a rank is gone", missing=exc.missing
            )
        except ConfigError as exc:
            self._end_process(str(exc), exc.exit_code)
        except BaseException as exc:  # the leader must not wait for an answer
            self._end_process_after(exc)
        else:
            if self._runner is not None:
                done = msgspec.structs.replace(done, prepared=self._runner.peers.prepared)
        self._stream.send(done)
        if isinstance(command.what, commands.Run) and self._lost is None:
            self._propose()

    def _propose(self) -> None:
        """Propose draft tokens, as the leader does after a step."""
        try:
            self._built_runner.propose()
        except PeerLost as exc:
            self._lost = exc
        except BaseException as exc:
            self._end_process_after(exc)

    def _end_process_after(self, exc: BaseException) -> NoReturn:
        log.error("the tensor-parallel worker failed", exc_info=exc)
        self._end_process(f"{type(exc).__name__}: {exc}", exit_code=1)

    def _end_process(self, cause: str, exit_code: int) -> NoReturn:
        """Report a failure to the leader, and end this process."""
        self._stream.send(commands.Failed(cause, exit_code))
        guard.end_process(exit_code)

    def _execute(self, command: commands.WorkerCommand) -> commands.CommandDone:
        match command.what:
            case commands.Build():
                return commands.CommandDone(command.seq, value=self._build(command.what))
            case commands.Allocate(limits=limits):
                self._built_runner.allocate(limits, self._progress)
            case commands.Run(plan=plan):
                return self._run(command.seq, plan)
            case Join() as join:
                from moeserve.comm.members import Members

                self._lost = None
                self._built_runner.join(Members.of(join, self._tp_rank), join.placement)
            case commands.Prepare(placement=placement):
                self._built_runner.peers.prepare(placement)
                threading.Thread(
                    target=self._report_placement, name="prepared", daemon=True
                ).start()
            case commands.Leave():
                pass  # `serve` has done it, so that this thread is idle now
        return commands.CommandDone(command.seq)

    @property
    def _built_runner(self) -> "ModelRunnerBase":
        assert self._runner is not None, "Build comes first"
        return self._runner

    def _progress(self, name: str, percent: int) -> None:
        self._stream.send(commands.LoadProgress(name, percent))

    def _build(self, build: commands.Build) -> int:
        of_leader = build.world
        world = replace(
            of_leader,
            rank=of_leader.rank + self._tp_rank,
            host_rank=of_leader.host_rank + self._tp_rank,
        )
        runner = make_rank(build.config, world, build.placement, grouped=True)
        runner.enter_thread()
        budget = runner.load(self._progress)
        self._runner = runner
        return budget

    def _run(self, seq: int, data: bytes) -> commands.CommandDone:
        from moeserve.engine.plan import decode_plan
        from moeserve.runner.group import checksum

        if self._lost is not None:
            raise self._lost
        collect_result = self._built_runner.launch(decode_plan(data))
        result = collect_result()
        return commands.CommandDone(
            seq, value=checksum(result), events=result.events, kv_lost=result.kv_lost
        )

    def _act_on_grammars(self, command: commands.WorkerCommand) -> None:
        """Prepare or drop grammars, in the thread that reads commands."""
        constraints = self._built_runner.constraints

        def report(error: str = "") -> None:
            self._stream.send(commands.CommandDone(command.seq, error=error))

        match command.what:
            case commands.PrepareGrammar(job):
                constraints.prepare(job, report)
            case commands.DropGrammars(tickets):
                constraints.drop(tickets)
                report()

    def _leave(self) -> None:
        """Interrupt the running step until the runner's thread is idle.

        This runs in the thread that reads commands.
        """
        self._lost = self._lost or PeerLost("this engine left its group")
        idle = threading.Event()
        self._thread.do(idle.set)
        while not idle.is_set():
            if self._runner is not None:
                self._runner.leave()
            idle.wait(INTERRUPT_INTERVAL_S)
        if self._runner is not None:
            # Again, because a `join` may have completed just before the thread was idle.
            self._runner.leave()

    def _report_placement(self) -> None:
        """Report progress until the placement is active or has failed.

        Steps report it, too, but there may be none meanwhile.
        """
        last_reported: int | None = None
        peers = self._built_runner.peers
        while peers.moving:
            if (prepared := peers.prepared) != last_reported:
                self._stream.send(commands.Prepared(prepared))
                last_reported = prepared
            time.sleep(POLL_INTERVAL_S)
        self._stream.send(commands.Prepared(peers.prepared))


if __name__ == "__main__":
    main()
