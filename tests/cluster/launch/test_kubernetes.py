"""`moeserve launch --kubernetes` with a stand-in for kubectl; no cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moeserve.cluster.launch import kubernetes
from moeserve.cluster.launch.files import Deployment
from moeserve.errors import ConfigError

STANDIN = Path(__file__).with_name("kubectl_standin.py")
WAIT_S = 60.0
RUNS = {"running": {"startedAt": "2026-11-25T00:00:00Z"}}
NEVER_FITS = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes have GPUs",
}


def ended(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code}}


class Cluster:
    """The cluster and the launcher's output, as a test plays and reads them."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capfd = capfd
        self._said = ""
        for name in ("bin", "pods", "logs"):
            (folder / name).mkdir()
        program = folder / "bin" / "kubectl"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN} "$@"\n')
        program.chmod(0o755)

    def pod(
        self, rank: int, state: dict[str, Any] | None = None, *, uid: str = "", **status: Any
    ) -> None:
        name = "moeserve-0" if rank == 0 else f"moeserve-0-{rank}"
        container = {"ready": status.pop("ready", False), "restartCount": 0, "state": state}
        status = (
            {"phase": "Pending"} | status | ({"containerStatuses": [container]} if state else {})
        )
        labels = {"leaderworkerset.sigs.k8s.io/worker-index": str(rank)}
        pod = {"metadata": {"name": name, "uid": uid or name, "labels": labels}, "status": status}
        if uid:
            pod["metadata"]["deletionTimestamp"] = "2026-11-25T00:00:00Z"
        (self.folder / "logs" / name).write_text(f"here is {name}\n")
        (self.folder / "new").write_text(json.dumps(pod))
        (self.folder / "new").rename(self.folder / "pods" / f"{uid or name}.json")

    def mark(self, name: str) -> None:
        (self.folder / name).touch()

    def calls(self) -> str:
        return (self.folder / "calls").read_text()

    async def said(self, text: str) -> str:
        async with asyncio.timeout(WAIT_S):
            while text not in self._said:
                self._said += self._capfd.readouterr().err
                await asyncio.sleep(0.01)
        return self._said


@pytest.fixture
def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Cluster:
    made = Cluster(tmp_path, capfd)
    monkeypatch.setenv("STANDIN", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(kubernetes, "RETRY_PAUSE_S", 0.05)
    return made


def launched(nodes: int = 2) -> asyncio.Task[int]:
    it = Deployment(["demo", "--dp", "2"], nodes, None, None, False, False, 8000, 30, "image")
    return asyncio.create_task(kubernetes.run_on_kubernetes(it, "space"))


async def test_from_the_first_pod_to_a_drain(cluster: Cluster) -> None:
    running = launched()
    cluster.pod(0, conditions=[NEVER_FITS])
    cluster.pod(1, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
    cluster.pod(0, ended(1), uid="of a launch before")
    await cluster.said("moeserve-0 (machine 0 of 2): Pending: Unschedulable: 0/3 nodes have GPUs")
    await cluster.said("moeserve-0-1 (machine 1 of 2): Pending: ImagePullBackOff: no such image")
    cluster.pod(0, RUNS)
    cluster.pod(1, RUNS)
    await cluster.said("moeserve-0-1 (machine 1 of 2): running")
    await cluster.said("moeserve-0-1 | here is moeserve-0-1")
    cluster.pod(0, RUNS, ready=True)
    await cluster.said("moeserve-0 (machine 0 of 2): ready")
    os.kill(os.getpid(), signal.SIGTERM)
    await cluster.said("SIGTERM: draining")
    cluster.pod(0, ended(0))
    assert "of a launch before" not in await cluster.said(
        "moeserve-0 (machine 0 of 2): ended with code 0"
    )
    assert not running.done()  # its pods are still there
    cluster.mark("gone")
    assert await running == 0
    assert (
        "delete secret/moeserve-cluster-key leaderworkerset/moeserve service/moeserve"
        in cluster.calls()
    )


async def test_the_secret_is_in_no_argument(cluster: Cluster) -> None:
    running = launched()
    await cluster.said(
        "created secret/moeserve-cluster-key, leaderworkerset/moeserve, service/moeserve"
    )
    secret, group, _ = yaml.safe_load_all((cluster.folder / "created").read_text())
    mounted = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["volumes"][-1][
        "secret"
    ]
    assert mounted["secretName"] == secret["metadata"]["name"]
    key = secret["stringData"]["cluster.key"]
    assert len(key) > 40
    assert key not in cluster.calls()
    cluster.mark("gone")
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 1  # nobody has seen the leader end


async def test_all_ends_with_the_leader_and_with_its_code(cluster: Cluster) -> None:
    """The leader's container may be running again by then."""
    running = launched()
    cluster.mark("gone")
    cluster.pod(0, ended(3))
    assert await running == 3
    said = await cluster.said("ended with code 3")
    assert "moeserve-0 | here is moeserve-0" in said


async def test_a_watch_that_ends_is_made_again(cluster: Cluster) -> None:
    running = launched()
    cluster.pod(0, RUNS)
    await cluster.said("moeserve-0 (machine 0 of 2): running")
    cluster.mark("ends")
    await cluster.said("kubectl | error: the server has closed the connection")
    cluster.mark("gone")
    cluster.pod(0, ended(7))
    assert await running == 7
    assert (await cluster.said("code 7")).count("moeserve-0 (machine 0 of 2): running") == 1


async def test_a_second_signal_ends_all_at_once(cluster: Cluster) -> None:
    running = launched()
    cluster.pod(0, RUNS)
    await cluster.said("moeserve-0 (machine 0 of 2): running")
    os.kill(os.getpid(), signal.SIGTERM)
    await cluster.said("draining")
    os.kill(os.getpid(), signal.SIGINT)
    cluster.mark("gone")
    assert await running == 128 + signal.SIGINT
    assert (
        "delete pods -l leaderworkerset.sigs.k8s.io/name=moeserve --grace-period=0 --force"
        in cluster.calls()
    )


async def test_what_kubectl_refuses_is_said_at_once_and_nothing_is_left(cluster: Cluster) -> None:
    cluster.mark("exists")
    cluster.mark("gone")
    with pytest.raises(
        ConfigError,
        match=r"AlreadyExists.*`kubectl --namespace space delete leaderworkerset/moeserve",
    ):
        await launched()
    assert (
        "--namespace space delete secret/moeserve-cluster-key --ignore-not-found" in cluster.calls()
    )


async def test_no_kubectl(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cluster.folder))
    with pytest.raises(ConfigError, match="kubectl is not on PATH"):
        await launched(1)
