"""Names from a hub, as a user gives them to `serve`, `verify`, `plan` and `LLM`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeserve import LLM, SamplingParams
from moeserve.cli.main import main
from moeserve.loader.model_dir import resolve_model_dir
from tests.hub_server import CHUNK, Hub, Repo, running_hub
from tests.ports import free_port

from .conftest import Server, running_server
from .test_standby import until

DEMO = resolve_model_dir("demo")
FLAGS = ("--max-model-len", "512", "--kv-cache-bytes", "64MiB")
PROMPT = "Once upon a time"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repos["some/demo"] = Repo({path.name: path.read_bytes() for path in DEMO.iterdir()})
        yield hub


def start(log: Path, *flags: str, **env: str) -> Server:
    """Start a server, and do not wait for it."""
    port = free_port()
    command = [sys.executable, "-m", "moeserve.cli.main", "serve", "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--threads", "1"],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=os.environ | env,
        )  # fmt: skip
    return Server(process, port, log)


def phase(server: Server) -> dict[str, Any]:
    try:
        return json.loads(server.get("/readyz")[1])
    except OSError:
        return {"phase": "", "percent": 0, "status": ""}


def is_downloading(server: Server) -> bool:
    assert server.process.poll() is None, server.log.read_text()
    return " of 19." in phase(server)["phase"]


def test_a_server_listens_while_it_downloads_and_a_kill_costs_nothing(
    hub: Hub, tmp_path: Path
) -> None:
    hub.stalls_after = 100 * CHUNK
    server = start(tmp_path / "log", "some/demo", *FLAGS)
    until(lambda: is_downloading(server) and phase(server)["percent"] > 10, 120)
    told = phase(server)
    assert told["status"] == "loading"
    assert told["phase"].startswith("downloading some/demo: ")
    assert 10 < told["percent"] < 100
    assert server.get("/livez")[0] == 200
    status, answer = server.post("/v1/completions", {"prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (503, "model_loading")  # type: ignore[index]
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.incomplete"))
    assert kept > 0
    hub.stalls_after = None
    hub.released.set()
    hub.requests.clear()
    (tmp_path / "settings.yaml").write_text(f"server: {{receipt_key: {tmp_path / 'key'}}}")
    assert main(["receipt-key", str(tmp_path / "key")]) == 0
    settings = ("--config", str(tmp_path / "settings.yaml"))
    with running_server(tmp_path / "log2", "some/demo", *settings, *FLAGS) as server:
        models = json.loads(server.get("/v1/models")[1])["data"]
        assert [model["id"] for model in models] == ["some/demo"]
        body = {"model": "some/demo", "prompt": PROMPT, "max_tokens": 8, "receipt": True}
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        assert phase(server)["phase"] == "ready"
    ranges = [each.headers.get("Range") for each in hub.requests if each.host == "cdn"]
    assert any(ranges)  # it went on where the killed server had stopped
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    command = [sys.executable, "-m", "moeserve.cli.main", "verify", "answer.json"]
    flags = ["--model", "some/demo", *FLAGS]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *flags], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["equal"]), done


def test_a_signal_ends_a_download_at_once(hub: Hub, tmp_path: Path) -> None:
    hub.stalls_after = 10 * CHUNK
    server = start(tmp_path / "log", "some/demo", *FLAGS)
    until(lambda: is_downloading(server), 120)
    began_s = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began_s < 15
    assert "Traceback" not in server.log.read_text()


def test_with_a_standby_the_root_downloads_and_answers(hub: Hub, tmp_path: Path) -> None:
    hub.stalls_after = 100 * CHUNK
    server = start(tmp_path / "log", "some/demo", "--standby", *FLAGS)
    until(lambda: is_downloading(server), 120)
    assert server.get("/livez")[0] == 200
    hub.stalls_after = None
    hub.released.set()
    server.wait_ready(180)
    models = json.loads(server.get("/v1/models")[1])["data"]
    assert [model["id"] for model in models] == ["some/demo"]
    assert server.stop() == 0
    assert len(hub.downloads("model-00001-of-00002.safetensors")) == 2  # at the hub and its CDN


def test_what_is_wrong_with_a_name_is_one_line_and_code_3(hub: Hub, tmp_path: Path) -> None:
    server = start(tmp_path / "log", "some/nothing", *FLAGS)
    assert server.process.wait(120) == 3
    last = server.log.read_text().splitlines()[-1]
    assert last.startswith("moeserve serve: there is no directory 'some/nothing', and http")
    assert "Traceback" not in server.log.read_text()


def test_each_machine_downloads_into_its_own_cache(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("the secret of two machines")
    (tmp_path / "key").chmod(0o600)
    machines = ["--nnodes", "2", "--dp", "2", "--cluster-key-file", str(tmp_path / "key"),
                "--rendezvous", f"127.0.0.1:{free_port()}", *FLAGS]  # fmt: skip
    hub.stalls_after = 200 * CHUNK
    second = start(
        tmp_path / "log1", "some/demo", "--node-rank", "1", *machines,
        HF_HUB_CACHE=str(tmp_path / "cache1"),
    )  # fmt: skip
    first = start(tmp_path / "log0", "some/demo", *machines)
    try:
        until(lambda: is_downloading(first), 120)
        hub.stalls_after = None
        hub.released.set()
        first.wait_ready(180)
        status, answer = first.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
        assert status == 200, answer
        assert len(list((tmp_path / "cache1").glob("models--some--demo/snapshots/*"))) == 1
    finally:
        for server in (first, second):
            server.stop()


def test_a_program_with_an_address_from_a_browser(hub: Hub) -> None:
    address = f"{hub.url}/some/demo/tree/main"
    greedy = SamplingParams(max_tokens=8, temperature=0)
    with LLM(address, max_model_len=256, kv_cache_bytes=64 * 2**20) as llm:
        (output,) = llm.generate([PROMPT], greedy, use_tqdm=False)
    with LLM("demo", max_model_len=256, kv_cache_bytes=64 * 2**20) as llm:
        (expected,) = llm.generate([PROMPT], greedy, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
