"""GET /v1/experts, once and as a stream, and /metrics about engines and experts."""

from __future__ import annotations

import asyncio
import json

import msgspec
import numpy as np
import pytest
import yarl
from prometheus_client.parser import text_string_to_metric_families

from moeserve.cluster.link import Resized
from moeserve.cluster.view import EngineView, ExpertsView, FleetView, RebalanceDecision
from moeserve.messages import ExpertLoad, StepOutput, StepRecord
from moeserve.moe.placement.placement import Placement
from moeserve.protocol import ExpertStatus
from tests.server.conftest import until

EXPERTS = "/v1/experts"
LOAD_LE = np.array([[10, 30, 0, 0], [5, 5, 5, 5]])


@pytest.fixture
async def sparse(live):
    """The server of a model with 2 MoE layers of 4 experts."""
    live.engine.outbox.put(
        Resized(msgspec.structs.replace(live.engine.ready(), num_moe_layers=2, num_experts=4))
    )
    await until(lambda: live.front.ready.num_experts == 4)
    return live


def load(counts: np.ndarray) -> ExpertLoad:
    return ExpertLoad(counts=counts.astype("<i8").tobytes(), num_layers=len(counts), version=0)


def step(
    rank: int, *, running: int, device_us: int, comm_us: int = 0, exposed_us: int = 0
) -> StepOutput:
    record = StepRecord(
        step=1,
        at_s=0.0,
        num_tokens=1,
        num_requests=1,
        num_running=running,
        num_waiting=0,
        num_free_blocks=9,
        num_blocks=10,
        device_us=device_us,
        vote_us=100,
        comm_us=comm_us,
        exposed_comm_us=exposed_us,
        dp_rank=rank,
    )
    return StepOutput(rids=b"", tokens=b"", finish=b"", record=record)


async def expert_metrics(live) -> dict[tuple[str, ...], float]:
    async with live.session.get(live.url + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return {
            (
                s.name.removeprefix("moeserve:"),
                *(v for k, v in sorted(s.labels.items()) if k != "model_name"),
            ): s.value
            for family in families
            for s in family.samples
        }


async def test_a_dense_model_has_none(live):
    status, answer = await live.get(EXPERTS)
    assert status == 404
    assert "dense" in answer["error"]["message"]
    assert not [name for name, *_ in await expert_metrics(live) if name.startswith("expert_")]


async def test_while_loading(launch):
    async with launch(ready=False) as live:
        assert (await live.get(EXPERTS))[0] == 503


async def test_one_engine_has_all_experts(sparse):
    sparse.engine.outbox.put(step(0, running=3, device_us=2000))
    sparse.engine.outbox.put(step(0, running=2, device_us=4000))
    for counts in (LOAD_LE, LOAD_LE, np.ones((3, 3))):  # the last one fits nothing
        sparse.engine.outbox.put(load(counts))
    await until(lambda: not len(sparse.engine.outbox))
    status, answer = await sparse.get(EXPERTS)
    assert status == 200, answer
    shown = msgspec.convert(answer, ExpertStatus)
    assert shown.load.total == (2 * LOAD_LE).tolist()
    assert shown.load.recent == pytest.approx((2 * LOAD_LE).astype(float), rel=0.01)
    assert (shown.dp, shown.tp, shown.num_layers, shown.num_experts) == (1, 1, 2, 4)
    assert shown.placement.experts == [[0, 1, 2, 3]] * 2
    (engine,) = shown.engines
    assert (engine.state, engine.pid, engine.running, engine.steps) == ("serving", 1, 2, 2)
    assert (engine.step_s, engine.mean_step_s) == (0.004, pytest.approx(0.003))
    (rank,) = shown.ranks
    assert (rank.slots, rank.share) == (4, 1.0)
    assert shown.balance.ranks_by_layer == [1, 1]
    assert shown.balance.experts_by_layer == [pytest.approx(1 / 3, abs=1e-3), 1]
    assert (shown.rebalancing.mode, shown.rebalancing.why) == (
        "off",
        "every engine has all experts",
    )
    values = await expert_metrics(sparse)
    assert values["expert_rows_total", "1", "0"] == 60
    assert values["expert_rows_total", "3", "1"] == 10
    assert (
        values["expert_balance",],
        values["engine_up", "0"],
        values["engine_steps_total", "0"],
    ) == (1, 1, 2)
    assert values["engine_step_seconds_total", "0"] == pytest.approx(0.006)
    assert values["engine_vote_seconds_total", "0"] == pytest.approx(0.0002)


def fleet_view(counts: np.ndarray, placement: Placement) -> FleetView:
    engines = [
        EngineView(
            rank=rank,
            host=f"node-{rank}",
            pid=100 + rank,
            state=state,
            epoch=3,
            restarts=rank,
            num_requests=5,
        )
        for rank, state in enumerate(("serving", "lost"))
    ]
    experts = ExpertsView(
        placement=placement.to_table(),
        num_layers=len(counts),
        counts=counts.astype("<i8").tobytes(),
        recent=(counts / 2).astype("<f8").tobytes(),
        balance=0.625,
        moved_bytes=4096,
        why="because",
        decisions=(
            RebalanceDecision(at_s=0.0, forced=True, version=1, error="no"),
            RebalanceDecision(at_s=1.0, forced=False, version=2, moved_bytes=4096, took_s=0.5),
        ),
        num_placed=1,
        num_given_up=1,
    )
    return FleetView(
        dp=2,
        tp=1,
        is_one_group=True,
        epoch=3,
        complete=False,
        waiting=1,
        engines=tuple(engines),
        experts=experts,
    )


async def test_several_engines(sparse, monkeypatch):
    placement = Placement(2, 2, 4, np.array([[0, 1, 1, 2, 3, 1], [0, 1, 0, 2, 3, 2]], np.int32))
    monkeypatch.setattr(
        sparse.front.monitor, "view", lambda state, ready: fleet_view(LOAD_LE, placement)
    )
    sparse.engine.outbox.put(step(0, running=3, device_us=2000, comm_us=1000, exposed_us=250))
    sparse.engine.outbox.put(step(1, running=4, device_us=6000))
    await until(lambda: not len(sparse.engine.outbox))
    _, answer = await sparse.get(EXPERTS)
    shown = msgspec.convert(answer, ExpertStatus)
    # Layer 0: expert 0 and two of the three replicas of expert 1 are on rank 0.
    loads = np.array([[10 + 20, 10], [10, 10]]) / 2
    assert [rank.share for rank in shown.ranks] == pytest.approx(
        (loads.sum(0) / loads.sum()).tolist(), abs=1e-4
    )
    assert shown.balance.ranks_by_layer == [pytest.approx(2 / 3, abs=1e-4), 1]
    assert [engine.state for engine in shown.engines] == ["serving", "lost"]
    assert [engine.host for engine in shown.engines] == ["node-0", "node-1"]
    assert [engine.step_s for engine in shown.engines] == [0.002, 0.006]
    assert [engine.overlap_efficiency for engine in shown.engines] == [0.75, 1]
    assert (shown.epoch, shown.complete, shown.waiting, shown.ep_sharded) == (3, False, 1, True)
    assert [one.version for one in shown.rebalancing.decisions] == [2, 1], "the newest first"
    values = await expert_metrics(sparse)
    assert [values["engine_up", rank] for rank in "01"] == [1, 0]
    assert [values["engine_requests_running", rank] for rank in "01"] == [3, 4]
    assert [values["engine_exposed_comm_seconds_total", rank] for rank in "01"] == [0.00025, 0]
    assert values["num_requests_running",] == 7, "engines add up"
    assert values["expert_moved_bytes_total",] == 4096
    assert (
        values["rebalance_decisions_total", "placed"],
        values["rebalance_decisions_total", "given_up"],
    ) == (1, 1)


async def test_former_names_are_shown_beside_the_new_ones(sparse, monkeypatch):
    placement = Placement.initial(2, 4, 2)
    monkeypatch.setattr(
        sparse.front.monitor, "view", lambda state, ready: fleet_view(LOAD_LE, placement)
    )
    _, answer = await sparse.get(EXPERTS)
    assert answer["dealt_out"] is answer["ep_sharded"] is True
    assert answer["placement"]["slots_per_rank"] == answer["placement"]["experts_per_rank"] == 2
    assert [engine["lanes"] for engine in answer["engines"]] == [
        engine["ubatches"] for engine in answer["engines"]
    ]


async def test_thousands_of_experts_are_no_series_of_their_own(sparse, monkeypatch):
    placement = Placement.initial(17, 256, 2)
    view = fleet_view(np.ones((17, 256), np.int64), placement)
    monkeypatch.setattr(sparse.front.monitor, "view", lambda state, ready: view)
    names = {name for name, *_ in await expert_metrics(sparse)}
    assert "expert_balance" in names
    assert "expert_rows_total" not in names


@pytest.mark.parametrize(
    ("query", "headers"),
    [("?stream=true&", {}), ("?", {"Accept": "text/event-stream"})],
    ids=["query", "header"],
)
async def test_a_stream_goes_on_until_the_server_drains(sparse, query, headers):
    url = f"{sparse.url}{EXPERTS}{query}interval_s=0.1"
    seen = []
    async with sparse.session.get(url, headers=headers) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            seen.append(msgspec.json.decode(line[6:], type=ExpertStatus))
            sparse.engine.outbox.put(load(LOAD_LE))
            if len(seen) == 3:
                break
        draining = asyncio.create_task(sparse.front.drain(0.0))
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        await draining
    assert [sum(map(sum, one.load.total)) for one in seen] == [0, 60, 120]
    assert not sparse.context.streams


async def test_a_client_that_leaves_ends_its_stream(sparse):
    async with sparse.session.get(f"{sparse.url}{EXPERTS}?stream=1&interval_s=0.1") as response:
        await response.content.readline()
        assert len(sparse.context.streams) == 1
        response.close()
    await until(lambda: not sparse.context.streams)


@pytest.mark.parametrize("name", ["%1F", "%0D%0AX-Evil:%201", "%E2%80%A8", "%00" * 99])
async def test_control_characters_in_a_name_reach_no_header(sparse, launch, name):
    async with sparse.session.get(
        yarl.URL(f"{sparse.url}{EXPERTS}?{name}=false", encoded=True)
    ) as response:
        assert response.status == 200
        assert "fields ignored: ?" in response.headers["Warning"]
        assert "X-Evil" not in response.headers
    async with launch(strict=True) as strict:
        answer = await strict.raw(
            (
                f"GET {EXPERTS}?{name}=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            ).encode()
        )
        assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("query", "param"),
    [("interval_s=0", "interval_s"), ("interval_s=61", "interval_s"), ("stream=maybe", "stream")],
)
async def test_nonsense_is_refused(sparse, query, param):
    status, answer = await sparse.get(f"{EXPERTS}?{query}")
    assert (status, answer["error"]["param"]) == (400, param)


async def test_unknown_parameters(sparse, launch):
    async with sparse.session.get(f"{sparse.url}{EXPERTS}?colour=red") as response:
        assert response.status == 200
        assert "colour" in response.headers["Warning"]
    async with launch(strict=True) as strict:
        assert (await strict.get(f"{EXPERTS}?colour=red"))[0] == 400


async def test_it_is_in_the_openapi_document(live):
    _, document = await live.get("/openapi.json")
    operation = document["paths"][EXPERTS]["get"]
    assert [one["name"] for one in operation["parameters"]] == ["stream", "interval_s"]
    content = operation["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    event = content["text/event-stream"]["itemSchema"]["properties"]["data"]["anyOf"][0][
        "contentSchema"
    ]
    for schema in (content["application/json"]["schema"], event):
        assert schema["$ref"].endswith("/ExpertStatus")
    assert "traceEvents" in json.dumps(document["components"]["schemas"]["TraceFile"])
