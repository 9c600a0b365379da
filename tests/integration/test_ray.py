"""`moeserve launch --ray` with real daemons of Ray: two nodes that are both this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .test_launch import COMPLETION, launched, until_said

pytestmark = [
    pytest.mark.full("ranks"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # of Ray's own
]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'moeserve[ray]'")
    from ray.cluster_utils import Cluster

    # Ray misses a node after 15 s otherwise.
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


def test_a_node_that_dies_is_replaced_by_one_that_comes(cluster: Any, tmp_path: Path) -> None:
    lost = cluster.add_node(num_cpus=1)
    with launched(
        tmp_path / "log", "--ray", "--nodes", "2", "--ray-address", cluster.address
    ) as server:
        until_said(server, "ray-1 (machine 1 of 2): ready")
        status, before = server.post("/v1/completions", COMPLETION)
        assert status == 200
        cluster.remove_node(lost, allow_graceful=False)
        until_said(server, "ray-1 (machine 1 of 2): lost")
        cluster.add_node(num_cpus=1)
        until_said(server, "ray-1 (machine 1 of 2): ready", 2)
        status, after = server.post("/v1/completions", COMPLETION)
        assert (status, after["choices"]) == (200, before["choices"])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert "ray-0 (machine 0 of 2): ended with code 0" in server.log.read_text()


def test_a_cluster_without_room_is_said(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is ours; Ray would wait for ever."""
    from moeserve.cluster.launch import on_ray
    from moeserve.errors import ConfigError

    monkeypatch.setattr(on_ray, "PLACEMENT_TIMEOUT_S", 1.0)
    try:
        with pytest.raises(
            ConfigError,
            match=r"no room within 1 s for 2 machines of {'CPU': 1}, STRICT_SPREAD; free",
        ):
            on_ray.start_ray_actors(2, cluster.address, "spread", 0)
    finally:
        __import__("ray").shutdown()
