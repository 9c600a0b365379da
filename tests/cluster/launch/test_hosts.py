from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.cluster.launch.targets import (
    Host,
    common_slots,
    in_slurm,
    over_ssh,
    parse_hosts,
    read_hostfile,
)
from moeserve.errors import ConfigError


def test_hosts_by_commas() -> None:
    hosts = parse_hosts("a, b-1.example.org:8,me@10.0.0.1,[fe80::1]:2")
    assert hosts == [Host("a"), Host("b-1.example.org", 8), Host("me@10.0.0.1"), Host("fe80::1", 2)]


def test_hostfiles_of_mpi_and_deepspeed(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(
        b"\xef\xbb\xbf# two racks\r\n\na\tslots=8  # the first\r\nb:8\n  me@c slots = 8\n"
    )
    hosts = read_hostfile(str(file))
    assert hosts == [Host("a", 8), Host("b", 8), Host("me@c", 8)]
    assert common_slots(hosts) == 8
    assert common_slots(parse_hosts("a,b")) is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a max_slots=2", "line 2: 'a max_slots=2' is no host"),
        ("a slots=0", "is no host"),
        ("-oProxyCommand=x", "is no host"),
        ("a b", "is no host"),
        ("a:b", "give ssh ports in"),
        ("first", "first is named twice"),
    ],
)
def test_a_line_that_is_no_host(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"first\n{line}\n")
    with pytest.raises(ConfigError, match=why):
        read_hostfile(str(file))


def test_a_hostfile_without_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(ConfigError, match="names 0 hosts"):
        read_hostfile(str(tmp_path / "hosts"))
    with pytest.raises(ConfigError, match="No such file"):
        read_hostfile(str(tmp_path / "nothing"))


def test_slots_that_differ() -> None:
    with pytest.raises(ConfigError, match="a has 8 slots, b has no number of slots"):
        common_slots(parse_hosts("a:8,b"))


def test_the_users_options_come_before_ours() -> None:
    """The first value that ssh sees of an option counts."""
    first, second = over_ssh(parse_hosts("me@a,b"), None, ["ConnectTimeout=60"])
    words = first.command
    assert words.index("-oConnectTimeout=60") < words.index("-oConnectTimeout=5")
    assert {"-oBatchMode=yes", "-T"} <= set(words)
    assert words[-3:-1] == ("--", "me@a")
    assert second.command[-2] == "b"
    with pytest.raises(ConfigError, match="must be NAME=VALUE"):
        over_ssh(parse_hosts("a"), None, ["-p 22"])


def test_a_step_for_each_node_of_a_job() -> None:
    places = in_slurm({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[08-10]"})
    assert [place.name for place in places] == ["n08", "n09", "n10"]
    assert {"--nodelist=n09", "--overlap", "--no-kill"} <= set(places[1].command)
    with pytest.raises(ConfigError, match="this is not a Slurm job"):
        in_slurm({"SLURM_JOB_NODELIST": "n1"})
