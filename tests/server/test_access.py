"""Keys, probes, models, metrics, logs."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moeserve.config import ServerConfig
from moeserve.errors import AddressInUse, ConfigError
from moeserve.messages import Phase
from moeserve.server.auth import Auth
from moeserve.server.errors import OllamaError
from moeserve.server.routes import ROUTES
from moeserve.server.run import bind

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_every_route_but_the_probes_needs_a_key(launch, route):
    async with launch(api_key=("right",)) as live:
        path = live.url + route.path + ("x" if route.path.endswith("/") else "") + route.suffix
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic right"},
            {"X-Api-Key": "x" * 8000},
            {"X-Api-Key": "schlüssel"},
        ):
            async with live.session.request(
                route.method, path + "?api_key=right", headers=headers
            ) as response:
                assert (response.status == 401) != route.probe
                if not route.probe:
                    error = (await response.json())["error"]
                    if route.error is OllamaError:  # has no code
                        assert "API key" in error
                    else:
                        assert error.get("code", error["type"]) in (
                            "invalid_api_key",
                            "authentication_error",
                        )
                    assert response.headers["WWW-Authenticate"] == "Bearer"
        for headers in (
            {"Authorization": "Bearer right"},
            {"authorization": "bearer right"},
            {"X-Api-Key": "right"},
        ):
            async with live.session.request(route.method, path, headers=headers) as response:
                assert response.status != 401


async def test_unknown_paths_need_a_key_too(launch):
    async with launch(api_key=("right",)) as live:
        assert (await live.get("/nothing"))[0] == 401


async def test_one_key_does_not_abort_anothers_request(launch, tmp_path):
    (tmp_path / "admin").write_text("root\n")
    async with launch(api_key=("one", "two"), admin_key_file=str(tmp_path / "admin")) as live:
        live.engine.gate.clear()
        asking = asyncio.create_task(live.post(CHAT, ASK, X_Api_Key="one", X_Request_Id="job"))
        async with asyncio.timeout(20):
            while not live.engine.rows:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        url = live.url + "/v1/requests/job"
        for key, status in (("two", 403), ("root", 200)):
            async with live.session.delete(url, headers={"X-Api-Key": key}) as response:
                assert response.status == status
        assert (await asking)[1]["choices"][0]["finish_reason"] == "abort"


async def test_keys_do_not_share_the_prefix_cache(launch):
    async with launch(api_key=("one", "two")) as live:
        salts = []
        for key, salt in (("one", None), ("two", None), ("one", "mine")):
            await live.post(CHAT, ASK | {"cache_salt": salt}, X_Api_Key=key)
            salts.append(live.engine.told[-1].salt)
        assert len(set(salts)) == 3
        assert not any("one" in salt for salt in salts)
    async with launch() as live:
        await live.post(CHAT, ASK)
        assert live.engine.told[-1].salt == ""


def test_key_files(tmp_path):
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match="api-key-file"):
        Auth(ServerConfig(api_key_file=str(path)))
    path.write_text("# only a comment\n\n")
    with pytest.raises(ConfigError, match="no key"):
        Auth(ServerConfig(api_key_file=str(path)))
    path.write_text("k1\n k2 \n")
    auth = Auth(ServerConfig(api_key_file=str(path)))
    assert auth.several_owners
    assert auth.check({"X-Api-Key": "k2"}).owner
    with pytest.raises(ConfigError, match="empty"):
        Auth(ServerConfig(api_key=("",)))


async def test_while_loading_probes_tell_the_phase_and_requests_are_put_off(launch):
    async with launch(ready=False) as live:
        assert (await live.get("/livez"))[0] == 200
        for path in ("/readyz", "/health", "/startupz"):
            status, body = await live.get(path)
            assert (status, body["status"]) == (503, "loading")
        live.context.front = live.front
        live.engine.outbox.put(Phase("reading weights", 40, 1.0))
        async with asyncio.timeout(20):
            while live.front.phase.percent != 40:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        _, body = await live.get("/readyz")
        assert (body["phase"], body["percent"]) == ("reading weights", 40)
        for path, asked in (
            (CHAT, ASK),
            ("/v1/completions", {"prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            status, body, response = await live.post(path, asked)
            assert (status, body["error"]["code"]) == (503, "model_loading")
            assert int(response.headers["Retry-After"]) >= 1
        assert (await live.get("/v1/models"))[0] == 503


async def test_when_ready_and_when_draining(live):
    for path in ("/livez", "/ping", "/readyz", "/health", "/startupz"):
        status, body = await live.get(path)
        assert (status, body["status"], body["phase"], body["percent"]) == (
            200,
            "ready",
            "ready",
            100,
        )
    live.context.draining = True
    _, body = await live.get("/readyz")
    assert (body["status"], body["phase"]) == ("draining", "draining")
    for path in ("/livez", "/ping"):
        assert (await live.get(path))[0] == 200
    status, body, _ = await live.post(CHAT, ASK)
    assert (status, body["error"]["code"]) == (503, "server_draining")


async def test_an_engine_without_progress_is_not_ready(live):
    live.engine.healthy = False
    for path, status in (("/livez", 200), ("/readyz", 503), ("/health", 503), ("/startupz", 200)):
        assert (await live.get(path))[0] == status
    assert (await live.get("/readyz"))[1]["status"] == "stalled"
    live.engine.healthy = True
    assert (await live.get("/readyz"))[0] == 200


async def test_a_full_queue_is_a_503_with_retry_after(launch):
    async with launch(max_queued_requests=0) as live:
        live.engine.gate.clear()
        full = asyncio.create_task(live.post(CHAT, ASK | {"n": 64}))
        async with asyncio.timeout(20):
            while len(live.engine.rows) < 64:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        status, body, response = await live.post(CHAT, ASK | {"stream": True})
        assert (status, body["error"]["code"], body["error"]["type"]) == (
            503,
            "server_overloaded",
            "server_error",
        )
        assert int(response.headers["Retry-After"]) >= 1
        live.engine.gate.set()
        assert (await full)[0] == 200


async def test_what_could_never_fit_is_no_overload(launch):
    async with launch(max_queued_requests=0) as live:
        for path, body in (
            (CHAT, ASK | {"n": 65}),
            ("/v1/completions", {"prompt": "a", "n": 65}),
            ("/v1/completions", {"prompt": ["a"] * 13, "n": 5}),
        ):
            status, answer, response = await live.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "invalid_value"), answer
            assert "at most 64" in answer["error"]["message"]
            assert "Retry-After" not in response.headers
        assert live.engine.told == []


async def test_prompts_that_do_not_all_fit_run_not_at_all(launch):
    async with launch(max_queued_requests=0) as live:
        live.engine.gate.clear()
        first = asyncio.create_task(live.post(CHAT, ASK | {"n": 60}))
        async with asyncio.timeout(20):
            while len(live.engine.rows) < 60:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        before = list(live.engine.told)
        assert (await live.post("/v1/completions", {"prompt": ["a"] * 5}))[0] == 503
        assert live.engine.told == before
        live.engine.gate.set()
        assert (await first)[0] == 200


async def test_head_is_get_without_a_body(live):
    async with live.session.head(live.url + "/readyz") as response:
        assert response.status == 200
        assert await response.read() == b""
        assert response.headers["Server"] == "moeserve"


async def test_models(live):
    _, listed = await live.get("/v1/models")
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("org/tiny", "model", 256)
    for path in ("org/tiny", "org%2Ftiny"):
        assert (await live.get(f"/v1/models/{path}"))[1] == card
    for path in ("other", "", "x" * 8000):
        status, body = await live.get(f"/v1/models/{path}")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert (await live.get("/version"))[1]["version"]


async def test_metrics_are_what_prometheus_reads(live):
    await live.post(CHAT, ASK)
    await live.get("/nothing")
    async with live.session.get(live.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        families = {
            family.name: family for family in text_string_to_metric_families(await response.text())
        }
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["moeserve:generation_tokens_total", "org/tiny"] == 3
    assert values["moeserve:request_success_total", "length", "org/tiny"] == 1
    assert values["moeserve:prefix_cache_hits_total", "org/tiny"] == 2
    assert values["moeserve:num_requests_running", "org/tiny"] == 0
    assert values["moeserve:time_to_first_token_seconds_count", "org/tiny"] == 1
    assert values["moeserve:inter_token_latency_seconds_count", "org/tiny"] == 2
    assert values["moeserve:e2e_request_latency_seconds_bucket", "+Inf", "org/tiny"] == 1
    assert values["moeserve:http_responses_total", "404", "other"] == 1
    assert 0 <= values["moeserve:kv_cache_usage_perc", "org/tiny"] <= 1
    states = [
        values["moeserve:num_states" + which, "org/tiny"] for which in ("", "_running", "_cached")
    ]
    assert states == [8, 2, 2]
    # One rank: no rows travel.
    for name in ("comm_seconds_total", "exposed_comm_seconds_total"):
        assert values[f"moeserve:{name}", "org/tiny"] == 0
    assert values["moeserve:overlap_efficiency", "org/tiny"] == 1
    assert all(family.documentation for family in families.values())


def test_addresses_that_cannot_be_listened_on():
    sock = bind(ServerConfig(port=0))
    sock.listen()
    with pytest.raises(AddressInUse, match="in use"):
        bind(ServerConfig(port=sock.getsockname()[1]))
    sock.close()
    with pytest.raises(ConfigError, match="--host"):
        bind(ServerConfig(host="no.such.host.invalid"))
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(ServerConfig(host="203.0.113.1"))


async def test_a_model_is_listed_and_asked_for_by_each_of_its_names(live):
    live.front.model_names = ("org/tiny", "claude-x")
    _, listed = await live.get("/v1/models")
    assert [card["id"] for card in listed["data"]] == ["org/tiny", "claude-x"]
    assert {card["root"] for card in listed["data"]} == {"org/tiny"}
    status, card = await live.get("/v1/models/claude-x")
    assert (status, card) == (200, listed["data"][1])
    body = {"model": "claude-x", "prompt": "Once", "max_tokens": 2}
    status, answer, _ = await live.post("/v1/completions", body)
    assert (status, answer["model"]) == (200, "org/tiny")
    status, answer, _ = await live.post("/v1/completions", body | {"model": "other"})
    assert status == 404
    assert "'org/tiny', 'claude-x'" in answer["error"]["message"]
