"""Mistakes that `moeserve launch` rejects before it starts anything."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

import pytest

from moeserve.cli.main import main


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--local 2 -- chat", "put the command for all machines after --"),
        ("--local 2", "put the command for all machines after --"),
        ("--local two -- serve", "--local two: must be a number from 1 to 1024"),
        ("--local 2 -- serve --nnodes 2", "--nnodes: omit it"),
        ("--local 2 -- serve --node-rank 1", "--node-rank: omit it"),
        ("--local 2 -- serve --cluster-key-file k", "--cluster-key-file: omit it"),
        (
            "--local 3 -- serve --dp 2",
            "--dp 2: each of the 3 machines needs an engine; use --dp 3 or more",
        ),
        (
            "--hosts a:8,b:8 -- serve --dp 4 --tp 2",
            "--dp 4 contradicts slots=8: 2 machines have 8 engines of --tp 2",
        ),
        ("--hosts a:3,b:3 -- serve --tp 2", "slots=3 cannot be shared by engines of --tp 2"),
        ("--hosts a,,b -- serve", "--hosts: '' is no host"),
        ("--hostfile /nowhere -- serve", "--hostfile /nowhere"),
        ("--slurm -- serve", "salloc --nodes N --no-kill"),
        ("--local 2 --python x -- serve", "--python is only for --hosts, --hostfile"),
        ("--local 2 --ssh-option A=b -- serve", "--ssh-option is only for"),
        ("--local 2 --nodes 2 -- serve", "--nodes is only for --kubernetes, --print, --ray"),
        (
            "--print slurm --nodes 2 --image x -- serve",
            "--image is only for --kubernetes, --print lws, --print compose",
        ),
        ("--print lws -- serve", "--print lws needs --nodes N"),
        ("--print lws --nodes 2 -- serve --port 0", "--port 0: must be a number from 1 to 65535"),
        (
            "--print compose --nodes 2 -- serve --port 0",
            "--port 0: must be a number from 1 to 65535",
        ),
        ("--local 2 --env NOT_SET_ANYWHERE -- serve", "--env NOT_SET_ANYWHERE: must be NAME=VALUE"),
        ("--local 2 --max-restarts -- -1", "expected one argument"),
        ("--hosts a --slurm -- serve", "not allowed with argument"),
        ("--ray --gpus-per-node x -- serve", "--gpus-per-node x: must be a number from 0 to 1024"),
        ("--ray --nodes 0 -- serve", "--nodes 0: must be a number from 1 to 1024"),
        ("--ray --ray-placement near -- serve", "invalid choice: 'near'"),
        ("--local 2 --ray-address x -- serve", "--ray-address is only for --ray"),
        ("--local 2 --namespace x -- serve", "--namespace is only for --kubernetes"),
        ("--kubernetes --image x -- serve", "--kubernetes needs --nodes N"),
        ("--kubernetes --nodes 2 -- serve", "--kubernetes needs --image IMAGE"),
        (
            "--kubernetes --nodes 2 --image x --env A=b -- serve",
            "--env is only for --hosts, --hostfile, --slurm, --ray, --local",
        ),
        (
            "--kubernetes --nodes 2 --image x -- serve --dp 1",
            "each of the 2 machines needs an engine; use --dp 2 or more",
        ),
        (
            "-- serve",
            "choose where to start: one of --hosts, --hostfile, --slurm, --ray, --local, "
            "--kubernetes, --print",
        ),
        ("--local 2 -- serve --prot 1", "did you mean --port?"),
    ],
)
def test_what_cannot_be_launched(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["launch", *words.split()])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    assert (code, why in (err := capsys.readouterr().err) or err) == (2, True)


def test_ray_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["launch", "--ray", "--nodes", "2", "--", "serve"]) == 2
    assert "pip install 'moeserve[ray]'" in capsys.readouterr().err


def test_an_address_where_no_ray_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray itself would try for minutes. What is imported here is no part of the answer."""
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    malformed = "must be HOST:PORT or ray://HOST:10001"
    for address, why in (
        ("127.0.0.1:1", ""), ("here", malformed), ("127.0.0.1:x", malformed), (":6379", malformed),
        ("h:0", malformed), ("h:65536", malformed), ("h:" + "9" * 5000, malformed),
    ):  # fmt: skip
        assert main(["launch", "--ray", "--ray-address", address, "--", "serve"]) == 2
        assert f"--ray-address {address}: {why}" in (err := capsys.readouterr().err)
        assert "invalid literal" not in err


def test_numbers_of_machines_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESERVE_NNODES", "2")
    assert main(["launch", "--local", "2", "--", "serve"]) == 2
    assert "MOESERVE_NNODES: omit it" in capsys.readouterr().err
