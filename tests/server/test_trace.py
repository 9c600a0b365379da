"""POST /v1/admin/trace: who may, what is asked of the engines, and a file that trace viewers can
read.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from moeserve.cluster.view import EngineView, FleetView
from moeserve.frontend.engine_monitor import Trace, Tracing
from moeserve.messages import Traced, TraceEvent, TraceNext
from moeserve.server import trace as trace_module
from moeserve.server.trace import trace_file
from tests.server.conftest import until

TRACE = "/v1/admin/trace"
ADMIN = {"X_Api_Key": "root"}


@pytest.fixture
def admin_key_file(tmp_path):
    (tmp_path / "admin").write_text("root\n")
    return str(tmp_path / "admin")


def rank_events(zero_ns: int) -> list[TraceEvent]:
    spans = [
        ("engine", "plan", 0, 500, -1),
        ("engine", "run", 500, 9000, -1),
        ("engine", "update", 9000, 9100, -1),
    ]
    for ubatch, at in ((0, 1000), (1, 2000)):
        spans += [
            (f"micro-batch {ubatch}", "attention", at, at + 900, 0),
            (f"micro-batch {ubatch}", "experts", at + 3000, at + 3500, 0),
        ]
        spans += [(f"transfer {ubatch}", "dispatch", at + 901, at + 2999, 0)]
    return [
        TraceEvent(name, track, zero_ns + start, zero_ns + end, layer)
        for track, name, start, end, layer in spans
    ]


def fleet_view(
    *hosts: str, tp: int = 1, together: bool = True, states: tuple[str, ...] = ()
) -> FleetView:
    engines = [
        EngineView(
            rank=rank,
            host=host,
            pid=1,
            state=states[rank] if states else "serving",
            epoch=1,
            restarts=0,
            num_requests=0,
        )
        for rank, host in enumerate(hosts)
    ]
    return FleetView(
        dp=len(hosts),
        tp=tp,
        is_one_group=together,
        epoch=1,
        complete=True,
        waiting=0,
        engines=tuple(engines),
        experts=None,
    )


def check(file: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rules of the trace event format, as far as we use it; returns the spans by process and
    track.
    """
    assert file["displayTimeUnit"] in ("ms", "ns")
    names: dict[str, dict[Any, str]] = {"process_name": {}, "thread_name": {}}
    spans: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in file["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name",
                "process_sort_index",
                "thread_name",
                "thread_sort_index",
            )
            if event["name"] in names:
                key = event["pid"], event["tid"] if event["name"] == "thread_name" else 0
                assert key not in names[event["name"]]
                names[event["name"]][key] = event["args"]["name"]
            else:
                assert isinstance(event["args"]["sort_index"], int)
            continue
        assert event["name"]
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        where = (
            names["process_name"][event["pid"], 0],
            names["thread_name"][event["pid"], event["tid"]],
        )
        spans.setdefault(where, []).append(event)
    for track in spans.values():
        ordered = sorted(track, key=lambda event: (event["ts"], event["dur"]))
        for one, next_one in pairwise(
            ordered
        ):  # to the nanosecond: spans of a track lie side by side
            assert round(1000 * (one["ts"] + one["dur"])) <= round(1000 * next_one["ts"]), (
                one,
                next_one,
            )
    return spans


def test_one_process_per_rank_and_one_track_per_ubatch_and_transfer():
    ranks = [Traced(7, dp, tp, rank_events(10**12)) for dp in (0, 1) for tp in (0, 1)]
    built = trace_file(Trace(ranks, [(1, 1)]), fleet_view("local", "local", tp=2))
    file = json.loads(trace_module.msgspec.json.encode(built))
    spans = check(file)
    titles = [f"rank {2 * dp + tp} (engine {dp}, tp {tp})" for dp in (0, 1) for tp in (0, 1)]
    tracks = ["engine", "micro-batch 0", "transfer 0", "micro-batch 1", "transfer 1"]
    assert list(dict.fromkeys(title for title, _ in spans)) == titles
    assert {title: sorted(track for t, track in spans if t == title) for title in titles} == {
        title: sorted(tracks) for title in titles
    }
    names = [
        e["args"]["name"]
        for e in file["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == 1
    ]
    assert names == tracks, "the viewer's order"
    (dispatch,) = spans[titles[3], "transfer 1"]
    assert (dispatch["name"], dispatch["ts"], dispatch["dur"]) == ("dispatch", 2.901, 2.098)
    assert dispatch["args"] == {"layer": 0}
    assert file["otherData"] == {"steps": {"0": 7, "1": 7}, "missing": ["1.1"]}


def test_clocks_of_several_machines_become_one():
    ranks = [
        Traced(7, 0, 0, rank_events(5)),
        Traced(7, 1, 0, rank_events(10**15)),
        Traced(7, 2, 0, rank_events(65)),
    ]
    spans = check(
        json.loads(
            trace_module.msgspec.json.encode(
                trace_file(Trace(ranks, []), fleet_view("a", "b", "a"))
            )
        )
    )
    plans = [spans[f"rank {rank} (engine {rank}, tp 0)", "engine"][0]["ts"] for rank in range(3)]
    assert plans == [0.0, 0.0, 0.06]


@pytest.mark.parametrize(("key", "status"), [({}, 403), ({"X_Api_Key": "user"}, 403), (ADMIN, 409)])
async def test_only_administrators_may(launch, admin_key_file, key, status):
    async with launch(
        api_key=("user",) if key != ADMIN else (), admin_key_file=admin_key_file
    ) as live:
        key = key or {"X_Api_Key": "user"}
        assert (await live.post(TRACE + "?timeout_s=0.1", b"", **key))[0] == status


async def test_it_is_off_without_admin_keys(launch):
    async with launch() as live:
        status, answer, _ = await live.post(TRACE, b"")
        assert status == 403
        assert "--admin-key-file" in answer["error"]["message"]


async def test_one_engine_is_asked_and_answers(launch, admin_key_file):
    async with launch(admin_key_file=admin_key_file) as live:
        asking = asyncio.create_task(live.post(TRACE, b"", **ADMIN))
        await until(lambda: TraceNext() in live.engine.told)
        assert (await live.post(TRACE, b"", **ADMIN))[1]["error"][
            "message"
        ] == "another trace is being taken"
        live.engine.outbox.put(Traced(3, 0, 0, rank_events(77)))
        status, file, _ = await asking
        assert status == 200, file
        assert {track for _, track in check(file)} >= {
            "engine",
            "micro-batch 0",
            "micro-batch 1",
            "transfer 0",
            "transfer 1",
        }
        assert file["otherData"] == {"steps": {"0": 3}, "missing": []}


async def test_nothing_runs(launch, admin_key_file):
    async with launch(admin_key_file=admin_key_file) as live:
        for _ in range(2):
            status, answer, _ = await live.post(TRACE + "?timeout_s=0.1", b"", **ADMIN)
            assert (status, answer["error"]["code"]) == (409, "conflict")
            assert "no step ran within 0.1 s" in answer["error"]["message"]
        for wrong in ("0", "61", "nan", "soon"):
            status, answer, _ = await live.post(f"{TRACE}?timeout_s={wrong}", b"", **ADMIN)
            assert (status, answer["error"]["param"]) == (400, "timeout_s")


class Link:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def send(self, msg: Any) -> None:
        self.told.append(msg)


async def take(view: FleetView, *answers: Traced, timeout_s: float = 5.0) -> Trace:
    tracing = Tracing(Link())  # type: ignore[arg-type]
    taking = asyncio.create_task(tracing.take(view, timeout_s))
    await asyncio.sleep(0)
    for answer in answers:
        tracing.add(answer)
    return await taking


async def test_a_group_is_traced_in_one_step():
    view = fleet_view("a", "a")
    late = Traced(4, 0, 0, [])  # asked for when nothing ran; it comes now
    first = Traced(5, 0, 0, [])
    second = Traced(5, 1, 0, [])
    assert (await take(view, late, first, second)).ranks == [first, second]


async def test_engines_on_their_own_are_traced_in_a_step_each():
    first = Traced(5, 0, 0, [])
    second = Traced(9, 1, 0, [])
    assert (await take(fleet_view("a", "a", together=False), second, first)).ranks == [
        first,
        second,
    ]


async def test_who_did_not_answer_is_named(monkeypatch):
    monkeypatch.setattr("moeserve.frontend.engine_monitor.LATE_TRACE_TIMEOUT_S", 0.05)
    answers = [Traced(5, 0, 0, []), Traced(5, 0, 1, []), Traced(5, 1, 0, [])]
    trace = await take(fleet_view("a", "a", tp=2), *answers)
    assert trace.ranks == answers
    assert trace.missing == [(1, 1)]
    alone = fleet_view("a", "a", together=False, states=("serving", "lost"))
    assert (await take(alone, Traced(5, 0, 0, []))).missing == [], (
        "nobody waits for an engine that is not there"
    )
    with suppress(TimeoutError):
        await asyncio.wait_for(take(alone, timeout_s=30), 0.01)  # the client leaves


async def test_a_control_character_in_a_name_reaches_no_header(launch, admin_key_file):
    async with launch(admin_key_file=admin_key_file, strict=True) as live:
        status, answer, _ = await live.post(f"{TRACE}?%1F=1", {}, **ADMIN)
        assert (status, answer["error"]["message"]) == (400, "unknown fields: ?")
