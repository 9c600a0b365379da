"""The vote over real sockets: threads and processes, deaths and silences, races of parking and
waking.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moeserve.comm.dp_coordinator import Wake, open_coordinator
from moeserve.comm.members import Members
from moeserve.comm.stream import frame
from moeserve.engine.plan import StepDecision
from moeserve.engine.vote import Action, Decision, DPCoordinator, Vote
from moeserve.errors import ConfigError, PeerLost, StepSkew
from tests.comm.ranks import members_of, together
from tests.comm.relay import DOWN, FORGERIES, UP, Relay, once
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent


async def coordinators_of(
    size: int, folder: Path, deadline_s: float | None = None
) -> list[DPCoordinator]:
    """All of a group on this loop. deadline_s: of a vote, but not of meeting."""
    coordinators = list(await asyncio.gather(*map(open_coordinator, members_of(size, str(folder)))))
    if deadline_s is not None:
        for coordinator in coordinators:
            coordinator.members = replace(coordinator.members, deadline_s=deadline_s)  # type: ignore[attr-defined]
    return coordinators


async def votes(coordinators: list[DPCoordinator], **fields: object) -> list[object]:
    rows = [Vote(epoch=1, **fields) for _ in coordinators]  # type: ignore[arg-type]
    return await asyncio.gather(
        *(c.exchange(v) for c, v in zip(coordinators, rows, strict=True)), return_exceptions=True
    )


def close(coordinators: list[DPCoordinator]) -> None:
    for coordinator in coordinators:
        coordinator.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_all_get_the_same_decision(size: int, tmp_path: Path) -> None:
    coordinators = await coordinators_of(size, tmp_path)
    for step in range(20):
        rows = [
            Vote(step, 1, has_work=step % 3 == rank % 3, tokens=rank + step) for rank in range(size)
        ]
        decisions = await asyncio.gather(
            *(c.exchange(v) for c, v in zip(coordinators, rows, strict=True))
        )
        assert decisions == [decisions[0]] * size
        decision = decisions[0].step_decision
        assert (decision is not None) == any(row.has_work for row in rows)
        assert decision is None or decision.most_tokens == (size - 1 + step, 0)
    assert not (tmp_path / "vote.sock").exists(), "nobody listens once all are in"
    close(coordinators)


async def test_any_engine_wakes_all_that_sleep_and_only_once(tmp_path: Path) -> None:
    coordinators = await coordinators_of(4, tmp_path)
    for waker in (3, 0, 1):
        step = (3, 0, 1).index(waker) * 2
        assert all(d.action is Action.PARK for d in await votes(coordinators, step=step))  # type: ignore[attr-defined]
        sleeping = [
            asyncio.create_task(c.wait_woken())
            for rank, c in enumerate(coordinators)
            if rank != waker
        ]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in sleeping)
        vote = asyncio.create_task(coordinators[waker].exchange(Vote(step + 1, 1, has_work=True)))
        await asyncio.wait_for(asyncio.gather(*sleeping), 15.0)
        assert all(
            coordinator.is_woken for rank, coordinator in enumerate(coordinators) if rank != waker
        )
        rest = [
            c.exchange(Vote(step + 1, 1)) for rank, c in enumerate(coordinators) if rank != waker
        ]
        assert all(d.action is Action.RUN for d in await asyncio.gather(vote, *rest))
        assert not any(coordinator.is_woken for coordinator in coordinators)
    close(coordinators)


async def test_a_wake_up_of_an_earlier_step_is_stale(tmp_path: Path) -> None:
    leader, follower = await coordinators_of(2, tmp_path)
    await votes([leader, follower], step=0)
    leader._streams[1].send(frame(Wake(0)))  # type: ignore[attr-defined]
    await asyncio.sleep(0.01)
    assert not follower.is_woken
    leader._streams[1].send(frame(Wake(1)))  # type: ignore[attr-defined]
    await asyncio.wait_for(follower.wait_woken(), 15.0)
    close([leader, follower])


async def test_a_skew_is_told_to_all(tmp_path: Path) -> None:
    coordinators = await coordinators_of(3, tmp_path)
    rows = [Vote(0, 1), Vote(0, 1), Vote(1, 1)]
    errors = await asyncio.gather(
        *(c.exchange(v) for c, v in zip(coordinators, rows, strict=True)), return_exceptions=True
    )
    assert all(
        isinstance(error, StepSkew) and "engine 2 in epoch 1, step 1" in str(error)
        for error in errors
    )
    close(coordinators)


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_whoever_leaves_breaks_the_group_for_all_with_what_it_knew(
    gone: int, tmp_path: Path
) -> None:
    coordinators = await coordinators_of(3, tmp_path)
    waiting = [
        asyncio.create_task(c.exchange(Vote(0, 1))) for r, c in enumerate(coordinators) if r != gone
    ]
    await asyncio.sleep(0.01)
    coordinators[gone].close("the exchange broke", (1,))
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, PeerLost)
        assert "the exchange broke" in str(error)
        assert error.missing == (1,)
    for coordinator in coordinators:
        await asyncio.wait_for(coordinator.wait_lost(), 15.0)
        with pytest.raises(PeerLost):
            await coordinator.exchange(Vote(0, 1))
        with pytest.raises(PeerLost):
            await coordinator.wait_woken()


@pytest.mark.parametrize("silent", [0, 2])
async def test_a_silent_engine_is_named_after_the_deadline(silent: int, tmp_path: Path) -> None:
    coordinators = await coordinators_of(3, tmp_path, deadline_s=2.0)
    await votes(coordinators, step=0)
    began_s = time.monotonic()
    waiting = [
        asyncio.create_task(c.exchange(Vote(1, 1)))
        for r, c in enumerate(coordinators)
        if r != silent
    ]
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, PeerLost)
        assert error.missing == (silent,)
    assert time.monotonic() - began_s > 1.9
    close(coordinators)


async def test_a_group_that_sleeps_has_no_deadline(tmp_path: Path) -> None:
    coordinators = await coordinators_of(2, tmp_path, deadline_s=2.0)
    await votes(coordinators, step=0)
    await asyncio.sleep(3.0)
    decisions = await votes(coordinators, step=1, has_work=True)
    assert all(d.action is Action.RUN for d in decisions)  # type: ignore[attr-defined]
    close(coordinators)


async def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    members = [replace(one, deadline_s=2.0) for one in members_of(6, str(tmp_path), tp_size=2)]
    errors = await asyncio.gather(
        open_coordinator(members[0]), open_coordinator(members[2]), return_exceptions=True
    )
    assert isinstance(errors[0], PeerLost)
    assert "engine 2 did not come" in str(errors[0])
    assert errors[0].missing == (4, 5)
    if isinstance(errors[1], PeerLost):
        raise errors[1]
    assert not isinstance(errors[1], BaseException)
    await asyncio.wait_for(errors[1].wait_lost(), 15.0)
    with pytest.raises(PeerLost, match="engine 0 did not open"):
        await open_coordinator(replace(members[2], deadline_s=0.1))


@pytest.mark.parametrize("change", [{"token": "another"}, {"epoch": 2}])
async def test_a_wrong_token_or_epoch_is_turned_away(
    change: dict[str, object], tmp_path: Path
) -> None:
    members = members_of(2, str(tmp_path))
    leader = asyncio.create_task(open_coordinator(members[0]))
    with pytest.raises(PeerLost, match="another token or epoch"):
        await open_coordinator(replace(members[1], **change))  # type: ignore[arg-type]
    follower = await open_coordinator(members[1])
    close([await leader, follower])


async def test_a_stranger_that_says_nothing_or_nonsense_holds_nobody_up(tmp_path: Path) -> None:
    members = members_of(3, str(tmp_path))
    leader = asyncio.create_task(open_coordinator(members[0]))
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    await asyncio.sleep(0.05)
    for stranger in strangers:
        stranger.connect(str(tmp_path / "vote.sock"))
    strangers[1].send(os.urandom(500))
    strangers[2].close()
    followers = await asyncio.gather(*map(open_coordinator, members[1:]))
    close([await asyncio.wait_for(leader, 15.0), *followers])
    for stranger in strangers:
        stranger.close()


async def test_nonsense_from_a_member_breaks_the_group(tmp_path: Path) -> None:
    leader, follower = await coordinators_of(2, tmp_path)
    follower._streams[0].send(b"\xff" * 64)  # type: ignore[attr-defined]
    await asyncio.wait_for(leader.wait_lost(), 15.0)
    assert "sent invalid data" in str(leader.lost)
    await asyncio.wait_for(follower.wait_lost(), 15.0)


async def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at .*vote\.sock"):
        await open_coordinator(members_of(2, str(tmp_path / "missing"))[0])


def on_hosts(size: int) -> list[Members]:
    hosts = tuple(f"host{r}" for r in range(size))
    vote = f"127.0.0.1:{free_port()}"
    return [replace(one, host_of=hosts, vote=vote) for one in members_of(size)]


async def test_several_hosts_meet_over_tcp() -> None:
    async def body(members: Members) -> object:
        coordinator = await open_coordinator(members)
        for step in range(50):
            decision = await coordinator.exchange(Vote(step, 1, has_work=True, tokens=members.rank))
        await asyncio.sleep(0.05)  # the others have read the last one
        coordinator.close()
        return decision.step_decision and decision.step_decision.most_tokens

    assert await asyncio.gather(*map(body, on_hosts(3))) == [(2, 0)] * 3


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_vote_that_was_altered_on_the_way_ends_the_group(forgery: str, way: str) -> None:
    leader, follower = on_hosts(2)
    async with Relay(leader.vote, once(forgery, way, 3)) as relay:
        ours = await asyncio.gather(
            open_coordinator(leader), open_coordinator(replace(follower, vote=relay.address))
        )
        outcomes: list[object] = []
        for step in range(4):
            outcomes += await votes(list(ours), step=step, has_work=True)
        for coordinator in ours:
            await asyncio.wait_for(coordinator.wait_lost(), 15.0)
    told = ours[0].lost if way == UP else ours[1].lost
    assert "altered on the way, or is not its own" in str(told)
    assert told is not None
    assert told.missing == ((1,) if way == UP else (0,))
    believed = [outcome.step_decision for outcome in outcomes if isinstance(outcome, Decision)]
    assert (
        believed
        == [StepDecision(step, 1, (0, 0), 0, False) for step in range(3) for _ in ours][
            : len(believed)
        ]
    )
    assert len(believed) < 7


async def test_who_listens_on_the_way_does_not_read_votes() -> None:
    leader, follower = on_hosts(2)
    async with Relay(leader.vote) as relay:
        ours = await asyncio.gather(
            open_coordinator(leader), open_coordinator(replace(follower, vote=relay.address))
        )
        for step in range(2):
            await votes(list(ours), step=step, tokens=77, has_work=True)
        close(list(ours))
    assert len(set(relay.seen)) == len(relay.seen) >= 4
    assert not [seen for seen in relay.seen if b"Vote" in seen]


async def test_a_port_that_was_taken_meanwhile_is_no_end() -> None:
    leader, _ = on_hosts(2)
    port = int(leader.vote.rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(PeerLost, match=f"cannot listen at .*{port}"),
    ):
        await open_coordinator(leader)


async def test_a_network_that_is_not_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, follower = on_hosts(2)
    tries: list[object] = []

    async def unreachable(sock: socket.socket, address: object) -> None:
        tries.append(address)
        raise OSError(errno.EHOSTUNREACH, "no route to host")

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", unreachable)
    with pytest.raises(PeerLost, match="engine 0 did not open the vote") as caught:
        await open_coordinator(replace(follower, deadline_s=1.0))
    assert caught.value.missing == (0,)
    assert len(tries) > 1


# ---- threads and processes


@pytest.mark.parametrize("size", [2, 3, 5])
def test_parking_never_loses_a_wake_up(size: int, tmp_path: Path) -> None:
    """Each thread is an engine with bursts of work at random moments, and votes only as the core
    does.
    """

    async def engine(members: Members) -> list[int]:
        rng = random.Random(members.rank)
        coordinator = await open_coordinator(members)
        ran = []
        step = 0
        left = 120
        parked = False
        while True:
            works = left > 0 and rng.random() < 0.6
            if parked and not works and not coordinator.is_woken and left > 0:
                try:
                    await asyncio.wait_for(
                        coordinator.wait_woken(), rng.choice([0.0, 0.0005, 0.002])
                    )
                except TimeoutError:
                    continue
            decision = await coordinator.exchange(Vote(step, 1, has_work=works, drained=left == 0))
            step = step + 1
            left = left - works
            parked = decision.action is Action.PARK
            if decision.action is Action.STOP:
                await asyncio.sleep(0.1)
                coordinator.close()
                return ran
            if decision.action is Action.RUN:
                ran.append(step)
            if parked and left == 0:
                await coordinator.wait_woken()
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.002)

    members = members_of(size, str(tmp_path))
    runs = together([lambda one=one: asyncio.run(engine(one)) for one in members])  # type: ignore[misc]
    assert runs == [runs[0]] * size
    assert len(runs[0]) >= 120


VOTER = """
import asyncio, json, sys
from dataclasses import replace
from moeserve.engine.vote import Vote
from moeserve.errors import PeerLost
from moeserve.comm.dp_coordinator import open_coordinator
from moeserve.comm.members import Members

async def main():
    members = Members(**json.loads(sys.argv[1]))
    coordinator = await open_coordinator(members)
    coordinator.members = replace(members, deadline_s=float(sys.argv[2]))
    print("in", flush=True)
    step = 0
    while True:
        await coordinator.exchange(Vote(step, 1, has_work=True))
        step += 1
        await asyncio.sleep(0.001)

try:
    asyncio.run(main())
except PeerLost as error:
    print(json.dumps([str(error), error.missing]), flush=True)
"""


def voters(size: int, folder: Path, deadline_s: float) -> list[subprocess.Popen[str]]:
    """Processes that vote on and on. deadline_s: of a vote; all of them start at the same time,
    which takes long on a busy machine.
    """
    started = []
    for one in members_of(size, str(folder), deadline_s=40.0):
        member = json.dumps({name: getattr(one, name) for name in one.__slots__})
        command = [sys.executable, "-c", VOTER, member, str(deadline_s)]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
    time.sleep(0.05)
    return started


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(("blow", "deadline_s"), [(signal.SIGKILL, 20.0), (signal.SIGSTOP, 4.0)])
def test_a_dead_or_stopped_process_is_named(
    victim: int, blow: int, deadline_s: float, tmp_path: Path
) -> None:
    processes = voters(3, tmp_path, deadline_s)
    began_s = time.monotonic()
    processes[victim].send_signal(blow)
    try:
        for rank, process in enumerate(processes):
            if rank != victim:
                cause, missing = json.loads(process.communicate(timeout=20)[0])
                assert missing == [victim], cause
                assert f"engine {victim}" in cause
        if blow == signal.SIGKILL:
            assert time.monotonic() - began_s < 15.0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
