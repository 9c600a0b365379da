"""Operations: vLLM's metric names, CORS, TLS, deadlines, the access log and spans."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.server import access_log
from moeserve.server.access_log import AccessLog
from moeserve.server.auth import Auth
from moeserve.server.context import Context
from moeserve.server.cors import Cors
from moeserve.server.run import bind, listening
from moeserve.server.tls import Tls
from tests.server.conftest import until

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
PAGE = "https://page.example"


async def samples(live, url: str = "") -> dict[str, dict[str, str]]:
    """The labels of each sample's name."""
    async with live.session.get((url or live.url) + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return {sample.name: sample.labels for family in families for sample in family.samples}


async def test_vllms_names_and_labels_are_served_if_asked(launch):
    async with launch(metrics_names="vllm") as live:
        await live.post(CHAT, ASK)
        found = await samples(live)
    served = {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    assert {
        "num_requests_running",
        "request_success_total",
        "iteration_tokens_total_count",
    } <= served
    for name, labels in found.items():
        if name.startswith("vllm:"):
            assert (labels["model_name"], labels["engine"]) == ("org/tiny", "0"), name
        else:
            assert name.startswith("moeserve:")
            assert name.removeprefix("moeserve:") not in served


async def test_the_times_of_a_request_are_split(live):
    await live.post(CHAT, ASK | {"n": 2})
    stats = live.front.stats
    for histogram in (stats.queue_s, stats.prefill_s, stats.decode_s):
        assert sum(histogram.counts) == 2
    assert sum(stats.request_longest.counts) == 1
    assert stats.request_longest.total == 3
    whole = stats.queue_s.total + stats.prefill_s.total
    assert whole == pytest.approx(stats.ttft_s.total)


async def test_metrics_on_a_port_of_their_own_need_no_key(tokenizer):
    config = ServerConfig(port=0, api_key=("right",))
    context = Context(config, Auth(config))
    sock = bind(config)
    other = bind(config, 0)
    async with listening(sock, context, other), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        for path, status in (("/metrics", 200), ("/livez", 200), ("/v1/models", 404)):
            async with session.get(url + path) as response:
                assert response.status == status
        async with session.get(f"http://127.0.0.1:{sock.getsockname()[1]}/metrics") as response:
            assert response.status == 401


async def test_a_listed_origin_may_call(launch):
    async with launch(api_key=("right",), allowed_origins=(PAGE,)) as live:
        asks = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-os",
        }
        async with live.session.options(
            live.url + CHAT, headers={"Origin": PAGE} | asks
        ) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert (
                response.headers["Access-Control-Allow-Headers"]
                == asks["Access-Control-Request-Headers"]
            )
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert "Access-Control-Allow-Credentials" not in response.headers
        async with live.session.options(
            live.url + CHAT, headers={"Origin": "https://evil.example"} | asks
        ) as response:
            assert response.status == 401
            assert "Access-Control-Allow-Origin" not in response.headers
        for key, stream, status in (
            ("right", False, 200),
            ("right", True, 200),
            ("wrong", False, 401),
        ):
            headers = {"Origin": PAGE, "X-Api-Key": key}
            async with live.session.post(
                live.url + CHAT, json=ASK | {"stream": stream}, headers=headers
            ) as response:
                await response.read()
            assert response.status == status
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
            assert response.headers["Vary"] == "Origin"


async def test_any_origin_or_none(launch):
    for origins, seen in ((("*",), "*"), ((), None)):
        async with launch(allowed_origins=origins) as live:
            _, _, response = await live.post(CHAT, ASK, Origin=PAGE)
            assert response.headers.get("Access-Control-Allow-Origin") == seen


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_origins": ("page.example",)},
        {"allowed_origins": ("https://page.example/",)},
    ],
)
def test_origins_that_no_browser_sends_are_refused(settings):
    with pytest.raises(ConfigError, match="origins"):
        Cors(ServerConfig(**settings))


def certificate(folder: Path, name: str) -> tuple[str, str]:
    folder.mkdir(exist_ok=True)
    cert = str(folder / "cert.pem")
    key = str(folder / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True
    )
    return cert, key


def trusting(cert: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=cert)


async def test_https_and_a_new_certificate_without_losing_connections(launch, tmp_path):
    cert, key = certificate(tmp_path / "one", "one")
    async with launch(ssl_certfile=cert, ssl_keyfile=key) as live:
        live.engine.gate.clear()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting(cert))) as old:
            running = asyncio.create_task(old.post(live.url + CHAT, json=ASK | {"stream": True}))
            async with asyncio.timeout(20):
                while not live.engine.rows:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            for written, new in zip((cert, key), certificate(tmp_path / "two", "two"), strict=True):
                os.replace(new, written)
            before = live.context.tls._present
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: live.context.tls._present is not before)
            async with (
                asyncio.timeout(20),
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting(cert))) as new,
            ):
                async with new.get(live.url + "/livez") as response:
                    assert response.status == 200
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await live.session.get(live.url + "/livez")
            live.engine.gate.set()
            async with await running as response:
                assert b"[DONE]" in await response.read()


def test_bad_certificates_are_named(tmp_path, caplog):
    cert, key = certificate(tmp_path / "a", "a")
    _, other = certificate(tmp_path / "b", "b")
    garbage = tmp_path / "garbage"
    garbage.write_text("hello")
    for files, words in (
        ((str(tmp_path / "none"), key), f"--ssl-certfile {tmp_path / 'none'}: No such file"),
        ((cert, str(tmp_path / "none")), f"--ssl-keyfile {tmp_path / 'none'}: No such file"),
        ((cert, other), "the key is not that of the certificate"),
        ((str(garbage), key), "PEM"),
        ((cert, None), "--ssl-keyfile"),
    ):
        with pytest.raises(ConfigError) as caught:
            Tls(*files)
        assert words in str(caught.value)
    tls = Tls(cert, key)
    garbage.replace(key)
    with pytest.raises(ConfigError):
        tls.read()


async def test_a_deadline_ends_a_request(live):
    live.engine.gate.clear()
    status, body, _ = await live.post(CHAT, ASK, X_Request_Timeout="0.05")
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert live.front.stats.num_active == 0
    for bad in ("0", "-1", "nan", "soon", "1e9"):
        status, body, _ = await live.post(CHAT, ASK, X_Request_Timeout=bad)
        assert (status, body["error"]["param"]) == (400, "X-Request-Timeout")
    live.engine.gate.set()
    assert (await live.post(CHAT, ASK, X_Request_Timeout="60"))[0] == 200


async def test_the_servers_own_deadline_ends_a_stream_with_an_error(launch):
    async with launch(request_timeout=1.0, sse_ping_s=0.1) as live:
        live.engine.gate.clear()
        async with live.session.post(live.url + CHAT, json=ASK | {"stream": True}) as response:
            assert response.status == 200
            text = (await response.read()).decode()
    assert '"code":"deadline_exceeded"' in text
    assert text.endswith("data: [DONE]\n\n")


async def test_one_json_line_per_request_without_its_text(launch, tmp_path):
    (tmp_path / "keys.yaml").write_text("keys: [{name: alice, key: k}]")
    log = AccessLog(str(tmp_path / "log"))
    async with launch(observers=[log], api_key_file=str(tmp_path / "keys.yaml")) as live:
        forged = "a\nERROR forged \x1b[31m"
        await live.post(CHAT, ASK | {forged: 1, "user": "secret"}, X_Request_Id="r1", X_Api_Key="k")
        await live.get("/livez")
        (tmp_path / "log").rename(tmp_path / "log.1")
        os.kill(os.getpid(), signal.SIGHUP)
        await until((tmp_path / "log").exists)
        await live.post(CHAT, {"messages": "secret"}, X_Api_Key="k")
    first, second = ((tmp_path / name).read_text() for name in ("log.1", "log"))
    assert "secret" not in first + second
    assert first.count("\n") == second.count("\n") == 1
    line = json.loads(first)
    assert (line["request_id"], line["route"], line["status"], line["key"]) == (
        "r1",
        CHAT,
        200,
        "alice",
    )
    assert (line["completion_tokens"], line["cached_tokens"]) == (3, 2)
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
    assert json.loads(second)["error"] == "invalid_value"


def test_an_access_log_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="access_log"):
        AccessLog(str(tmp_path / "none" / "log"))


async def test_a_slow_reader_of_the_access_log_holds_nobody_up(launch, monkeypatch, caplog):
    """Standard output is a full pipe that is not read."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    monkeypatch.setattr(access_log, "MAX_QUEUED_LINES", 20)
    log = AccessLog(f"/proc/self/fd/{writing}")
    async with launch(observers=[log]) as live:
        for _ in range(80):
            assert (await live.get("/v1/models"))[0] == 200
        assert "lines are lost" in caplog.text
        os.set_blocking(reading, False)
        await until(lambda: not log._queue.qsize() or not os.read(reading, 65536))
    os.close(reading)
    os.close(writing)


async def test_spans_are_children_of_their_senders(launch):
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from moeserve.server.otel import Spans

    exporter = memory.InMemorySpanExporter()
    spans = Spans(exporter, "org/tiny")
    async with launch(observers=[spans]) as live:
        await live.post(
            CHAT, ASK, traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        )
        await live.post(CHAT, {"messages": []})
    good, bad = exporter.get_finished_spans()
    assert f"{good.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{good.parent.span_id:016x}" == "b7ad6b7169203331"
    assert good.name == f"POST {CHAT}"
    assert good.attributes["gen_ai.usage.output_tokens"] == 3
    assert good.attributes["gen_ai.server.time_to_first_token"] > 0
    assert good.end_time > good.start_time
    assert bad.attributes["error.type"] == "invalid_value"
