"""The files of `moeserve launch --print`, to the letter, and what reads them.

After a change that is meant: `python -m moeserve.cli.main launch --print KIND ...` as in COMMANDS,
into golden/.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from moeserve.cli.main import main
from moeserve.cluster.launch.files import _quoted

HERE = Path(__file__).parent
SERVE = ["/models/qwen3-30b", "--tp", "2", "--port", "8080", "--shutdown-timeout", "60"]
COMMANDS = {
    "moeserve.sbatch": [
        "slurm",
        "--nodes",
        "4",
        "--",
        "serve",
        *SERVE,
        "--served-model-name",
        "my model",
    ],
    "lws.yaml": [
        "lws",
        "--nodes",
        "2",
        "--image",
        "registry.example.org/moeserve:1",
        "--",
        "serve",
        *SERVE,
    ],
    "compose.yaml": [
        "compose",
        "--nodes",
        "2",
        "--",
        "serve",
        *SERVE,
        "--api-key-file",
        "/models/keys$.yaml",
    ],
    "moeserve@.service": [
        "systemd",
        "--nodes",
        "2",
        "--",
        "serve",
        *SERVE,
        "--rendezvous",
        "10.0.0.1:29500",
    ],
}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "--print", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_files_to_the_letter(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert printed(capsys, *COMMANDS[name]) == (HERE / "golden" / name).read_text()


@pytest.fixture
def lws(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    group, service = yaml.safe_load_all(printed(capsys, *COMMANDS["lws.yaml"]))
    return group, service


def test_lws_knows_every_field(lws: tuple[dict[str, Any], dict[str, Any]]) -> None:
    schema = yaml.safe_load((HERE / "lws_schema.yaml").read_text())
    check = jsonschema.Draft202012Validator(schema)
    assert list(check.iter_errors(lws[0])) == []
    for path, value in (
        (("restartPolicy",), "Never"),
        (("leaderTemplate", "spec", "containerz"), []),
    ):
        wrong = yaml.safe_load(yaml.safe_dump(lws[0]))
        *folders, last = "spec", "leaderWorkerTemplate", *path
        at = wrong
        for folder in folders:
            at = at[folder]
        at[last] = value
        assert len(list(check.iter_errors(wrong))) == 1


def test_pods_find_what_they_mount_and_the_service_finds_its_port(
    lws: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    group, service = lws
    template = group["spec"]["leaderWorkerTemplate"]
    for which in ("leaderTemplate", "workerTemplate"):
        pod = template[which]["spec"]
        (container,) = pod["containers"]
        assert {it["name"] for it in container["volumeMounts"]} == {
            it["name"] for it in pod["volumes"]
        }
        (secret,) = [it["secret"] for it in pod["volumes"] if "secret" in it]
        assert secret["defaultMode"] == 0o400
        key = container["env"][0]["value"]
        assert key.rpartition("/")[0] in {it["mountPath"] for it in container["volumeMounts"]}
        assert pod["terminationGracePeriodSeconds"] > 60  # --shutdown-timeout
        assert ("readinessProbe" in container) == (
            which == "leaderTemplate"
        )  # the others answer no HTTP
    (port,) = template["leaderTemplate"]["spec"]["containers"][0]["ports"]
    assert (port["name"], port["containerPort"]) == (
        service["spec"]["ports"][0]["targetPort"],
        8080,
    )


def test_bash_reads_the_batch_script() -> None:
    script = HERE / "golden" / "moeserve.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    said = subprocess.run(
        ["bash", "-c", f"exec() {{ printf '%s\\n' \"$@\"; }}; . '{script}'"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "my model" in said.stdout.splitlines()


def test_words_of_systemd() -> None:
    assert _quoted("--dp") == "--dp"
    assert _quoted('a "b" 100% $x') == '"a \\"b\\" 100%% $$x"'


def test_one_machine_needs_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("lws", "compose", "systemd"):
        assert "cluster-key-file" not in printed(
            capsys, kind, "--nodes", "1", "--", "serve", "demo"
        )


def test_systemd_has_to_know_machine_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--print", "systemd", "--nodes", "2", "--", "serve"]) == 2
    assert "--rendezvous 10.0.0.1:29500" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["lws", "compose"])
def test_a_container_has_no_folder_beside_the_caller(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "qwen3").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (
        main(["launch", "--print", kind, "--nodes", "2", "--image", "x", "--", "serve", "./qwen3"])
        == 2
    )
    assert f"use {tmp_path / 'qwen3'}" in capsys.readouterr().err
