"""The environment variables of launchers, and the flags that follow from them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from moeserve.actor.handshake import read_secret
from moeserve.cluster.allocation import (
    Allocation,
    complete_settings,
    expand_nodelist,
    find_allocation,
    slurm_step_warning,
)
from moeserve.cluster.default_key import default_key
from moeserve.config import ParallelConfig
from moeserve.errors import ConfigError

LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "big-0.big.default"}
GROVE = {
    "GROVE_PCSG_NAME": "qwen-0-decode",
    "GROVE_PCSG_INDEX": "3",
    "GROVE_PCSG_TEMPLATE_NUM_PODS": "4",
    "GROVE_PCLQ_NAME": "qwen-0-decode-3-svc-wkr",
    "GROVE_PCLQ_POD_INDEX": "1",
    "GROVE_HEADLESS_SERVICE": "qwen-0.default.svc.cluster.local",
}
LEADER = GROVE | {"GROVE_PCLQ_NAME": "qwen-0-decode-3-svc-ldr", "GROVE_PCLQ_POD_INDEX": "0"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "h1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
EIGHT = TORCHRUN | {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
RESTARTED = TORCHRUN | {
    "RANK": "0",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "h2",
    "TORCHELASTIC_RESTART_COUNT": "1",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
}
JOB = {  # what a batch script has, and a shell of salloc, but for the last three
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "h[1-4]",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}
STEP = JOB | {
    "SLURM_STEP_ID": "7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "h[3-4]",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
}
ONE_TASK = STEP | {
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "h3",
}
SALLOC_SHELL = ONE_TASK | {"SLURM_STEP_ID": "4294967290", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (LWS, Allocation("LWS", 2, 1, "big-0.big.default")),
        (
            GROVE,
            Allocation("Grove", 4, 2, "qwen-0-decode-3-svc-ldr-0.qwen-0.default.svc.cluster.local"),
        ),
        (
            LEADER,
            Allocation("Grove", 4, 0, "qwen-0-decode-3-svc-ldr-0.qwen-0.default.svc.cluster.local"),
        ),
        (TORCHRUN, Allocation("torchrun", 2, 1, "h1", 29401)),
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
            Allocation("torchrun", 2, 1, "h1", 29400),
        ),
        (TORCHRUN | {"MASTER_PORT": "65535"}, Allocation("torchrun", 2, 1, "h1", 65534)),
        (RESTARTED, Allocation("torchrun", 2, 0, "h2", 29401)),
        (EIGHT, Allocation("torchrun", 2, 1, "h1", 29401, 3)),
        (EIGHT | {"LOCAL_RANK": "0"}, Allocation("torchrun", 2, 1, "h1", 29401, 3)),
        (SKYPILOT, Allocation("SkyPilot", 2, 1, "10.0.0.1")),
        (STEP, Allocation("Slurm", 2, 1, "h3", 22352)),
        (LWS | TORCHRUN | STEP, Allocation("LWS", 2, 1, "big-0.big.default")),
        (SKYPILOT | STEP, Allocation("SkyPilot", 2, 1, "10.0.0.1")),
        (STEP | RESTARTED, Allocation("torchrun", 2, 0, "h2", 29401)),  # its own order of machines
        (
            SKYPILOT | ONE_TASK,
            Allocation("SkyPilot", 2, 1, "10.0.0.1"),
        ),  # it starts each machine by a step
        (LWS | EIGHT, Allocation("LWS", 2, 1, "big-0.big.default", local_rank=3)),
    ],
)
def test_a_launcher_says_where_this_is(env: dict[str, str], found: Allocation) -> None:
    assert find_allocation(env) == found


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h1"},  # no launcher's own
        LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
        GROVE | {"GROVE_PCSG_NAME": ""},
        GROVE | {"GROVE_PCLQ_NAME": "qwen-0-decode-3-frontend"},
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "GROUP_RANK": "0"},
        SKYPILOT
        | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"},
        JOB,
        ONE_TASK,
        SALLOC_SHELL,
        ONE_TASK | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3"},
    ],
)
def test_one_machine_is_no_allocation(env: dict[str, str]) -> None:
    assert find_allocation(env) is None
    assert complete_settings(ParallelConfig(dp=3), (), env) == (ParallelConfig(dp=3), None)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        *(({key: value for key, value in LWS.items() if key != name}, name) for name in LWS),
        *(
            ({key: value for key, value in SKYPILOT.items() if key != name}, name)
            for name in SKYPILOT
        ),
        (LWS | {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE"),
        (LWS | {"LWS_GROUP_SIZE": "0"}, "LWS_GROUP_SIZE"),
        (LWS | {"LWS_GROUP_SIZE": "9" * 5000}, "LWS_GROUP_SIZE"),
        (LWS | {"LWS_WORKER_INDEX": "2"}, "LWS_WORKER_INDEX"),
        (LWS | {"LWS_WORKER_INDEX": "-1"}, "LWS_WORKER_INDEX"),
        (LWS | {"LWS_WORKER_INDEX": "\u0661"}, "LWS_WORKER_INDEX"),
        (LWS | {"LWS_LEADER_ADDRESS": "$(LWS_LEADER_ADDRESS)"}, "LWS_LEADER_ADDRESS"),
        (LWS | {"LWS_LEADER_ADDRESS": "big-0:80"}, "LWS_LEADER_ADDRESS"),
        (LWS | {"LWS_LEADER_ADDRESS": ".big.default"}, "LWS_LEADER_ADDRESS"),
        (LWS | {"LWS_LEADER_ADDRESS": "big-0..default"}, "LWS_LEADER_ADDRESS"),
        (GROVE | {"GROVE_PCLQ_NAME": "wkr"}, "GROVE_PCLQ_NAME"),
        (GROVE | {"GROVE_PCLQ_POD_INDEX": "3"}, "GROVE_PCLQ_POD_INDEX"),
        (LEADER | {"GROVE_PCLQ_POD_INDEX": "1"}, "GROVE_PCLQ_POD_INDEX"),
        (GROVE | {"GROVE_PCSG_TEMPLATE_NUM_PODS": ""}, "GROVE_PCSG_TEMPLATE_NUM_PODS"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT"),
        (TORCHRUN | {"GROUP_RANK": "2"}, "GROUP_RANK"),
        (TORCHRUN | {"RANK": "0"}, "RANK"),
        (EIGHT | {"LOCAL_RANK": "8"}, "LOCAL_RANK"),
        (EIGHT | {"WORLD_SIZE": "15"}, "WORLD_SIZE"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.1"}, "SKYPILOT_NODE_IPS"),
        (STEP | {"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID"),
        (STEP | {"SLURM_NODEID": "2"}, "SLURM_NODEID"),
        (STEP | {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
        (STEP | {"SLURM_STEP_NODELIST": "h[1-3]"}, "SLURM_STEP_NODELIST"),
        (STEP | {"SLURM_STEP_NODELIST": "h[1-"}, "SLURM_STEP_NODELIST"),
        (STEP | {"SLURM_LOCALID": "1"}, "SLURM_LOCALID"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "16"}, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_a_wrong_variable_is_named(env: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}(=| is not set)") as error:
        find_allocation(env)
    assert "--nnodes 1 serves on this machine alone" in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (LWS | {"LWS_WORKER_INDEX": "2"}, "='2': must be a number from 0 to 1 with 2 machines;"),
        (
            GROVE | {"GROVE_PCLQ_POD_INDEX": "3"},
            "='3': must be a number from 0 to 2 with 4 machines;",
        ),
        (GROVE | {"GROVE_PCSG_TEMPLATE_NUM_PODS": "2"}, "='1': must be 0 with 2 machines;"),
        (LEADER | {"GROVE_PCLQ_POD_INDEX": "1"}, "='1': must be 0: a group has one leader;"),
    ],
)
def test_a_wrong_number_of_a_machine_says_which_there_are(env: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_allocation(env)
    assert why in str(error.value)


def test_tasks_of_slurm_that_share_a_machine_learn_the_flag() -> None:
    for several in ({"SLURM_LOCALID": "1"}, {"SLURM_STEP_NUM_TASKS": "16"}):
        with pytest.raises(ConfigError, match="use srun --ntasks-per-node=1"):
            find_allocation(STEP | several)


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (
            LWS | SKYPILOT | {"SKYPILOT_NODE_RANK": "0"},
            "LWS says machine 1 of 2, SkyPilot says machine 0 of 2",
        ),
        (LWS | GROVE, "LWS says machine 1 of 2, Grove says machine 2 of 4"),
        (
            TORCHRUN
            | STEP
            | {
                "SLURM_STEP_NUM_NODES": "3",
                "SLURM_STEP_NUM_TASKS": "3",
                "SLURM_STEP_NODELIST": "a,b,c",
            },
            "torchrun says machine 1 of 2, Slurm says machine 1 of 3",
        ),
    ],
)
def test_contradictions_are_refused(env: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        find_allocation(env)


def test_flags_win_but_do_not_contradict() -> None:
    both = ParallelConfig(dp=2)
    of_dp = ParallelConfig(dp=2, nnodes=2, node_rank=1)
    placed, found = complete_settings(both, {"dp"}, LWS)
    assert (placed.nnodes, placed.node_rank, placed.rendezvous) == (2, 1, "big-0.big.default:29500")
    assert found == find_allocation(LWS)
    assert complete_settings(of_dp, {"nnodes", "node_rank"}, LWS)[0] == placed
    assert (
        complete_settings(ParallelConfig(dp=2, rendezvous="a:1"), {"rendezvous"}, LWS)[0].rendezvous
        == "a:1"
    )
    assert complete_settings(both, {"nnodes"}, LWS) == (both, None)  # --nnodes 1
    assert complete_settings(
        of_dp, {"nnodes", "node_rank", "rendezvous"}, {"LWS_GROUP_SIZE": "x"}
    ) == (
        of_dp,
        None,
    )
    with pytest.raises(ConfigError, match=r"^--nnodes is 4, LWS says 2: omit it"):
        complete_settings(ParallelConfig(dp=4, nnodes=4), {"nnodes"}, LWS)
    with pytest.raises(ConfigError, match=r"^--node-rank is 0, LWS says 1: omit it"):
        complete_settings(ParallelConfig(dp=2), {"node_rank"}, LWS)
    with pytest.raises(
        ConfigError, match=r"^--dp 1: each of the 2 machines of LWS .* --dp 2; --nnodes 1 serves"
    ):
        complete_settings(ParallelConfig(dp=1), {"dp"}, LWS)


def test_an_ipv6_address_is_bracketed() -> None:
    assert (
        complete_settings(ParallelConfig(dp=2), (), LWS | {"LWS_LEADER_ADDRESS": "fd00::1"})[
            0
        ].rendezvous
        == "[fd00::1]:29500"
    )


def test_a_shell_of_slurm_is_told_of_srun() -> None:
    for env in (JOB, SALLOC_SHELL):
        assert "has 4 machines" in slurm_step_warning(env)
        assert "srun --ntasks-per-node=1" in slurm_step_warning(env)
    for env in (
        {},
        STEP,
        ONE_TASK,
        JOB | {"SLURM_JOB_NUM_NODES": "1"},
        JOB | {"SLURM_JOB_NUM_NODES": "x"},
    ):
        assert slurm_step_warning(env) == ""


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("a", ["a"]),
        ("a[01-03,7],b", ["a01", "a02", "a03", "a7", "b"]),
        (
            "r[1-2]n[08-10]-ib",
            ["r1n08-ib", "r1n09-ib", "r1n10-ib", "r2n08-ib", "r2n09-ib", "r2n10-ib"],
        ),
        ("a[9-10]", ["a9", "a10"]),
    ],
)
def test_a_node_list_is_expanded(nodelist: str, names: list[str]) -> None:
    assert expand_nodelist(nodelist) == names


@pytest.mark.parametrize(
    "nodelist",
    [
        "",
        ",",
        "a,",
        "a,,b",
        "a b",
        "a[",
        "a]",
        "a[]",
        "a[1-]",
        "a[3-1]",
        "a[x]",
        "a[[1]]",
        "a[1-99999999]",
        "a[1-900]b[1-9]",
    ],
)
def test_a_node_list_that_is_none_is_refused(nodelist: str) -> None:
    with pytest.raises(ValueError, match=r"no (list|range|numbers)|not a list|more than"):
        expand_nodelist(nodelist)


def test_machine_0_makes_a_secret_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match=r"share no home; .* --cluster-key-file"):
        default_key(1, wait_s=0.0)
    made = default_key(0)
    secret = read_secret(made)
    assert stat.S_IMODE(Path(made).stat().st_mode) == 0o600
    assert [default_key(0), default_key(1)] == [made, made]
    assert read_secret(made) == secret
    assert [path.name for path in Path(made).parent.iterdir()] == ["cluster.key"]


def test_without_a_home_the_flag_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="give --cluster-key-file"):
        default_key(0)
