"""Which runner serves a device, what importing costs, and how many cores count."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moeserve.comm.tensor import DeviceTensor
from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.errors import ConfigError
from moeserve.kernels.attention_plan import SPLIT
from moeserve.runner import factory
from moeserve.runner.cpu import CPUModelRunner, allowed_cores, useful_threads
from moeserve.runner.factory import make_runner
from moeserve.runner.gpu import GPUModelRunner
from moeserve.runner.limits import (
    DeviceProperties,
    chunk_tokens,
    kv_budget,
    step_tokens,
    with_step_tokens,
)
from tests.runner.harness import FakeRunner, fake_runner, spec_of


def test_auto_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_cuda, expected in ((False, CPUModelRunner), (True, GPUModelRunner)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        assert type(make_runner(config_of(None), spec_of(), Path())) is expected
        assert type(make_runner(config_of(None, device="cpu"), spec_of(), Path())) is CPUModelRunner


def test_cuda_without_a_device_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"finds no CUDA device.*--device cpu"):
        make_runner(config_of(None, device="cuda"), spec_of(), Path())


def test_importing_and_making_the_gpu_runner_does_not_touch_cuda() -> None:
    code = (
        "import torch; from pathlib import Path; from moeserve.config import config_of;"
        "from moeserve.runner.gpu import GPUModelRunner; from tests.runner.harness import spec_of;"
        "GPUModelRunner(config_of(None), spec_of(), Path());"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=50
    )


def test_threads_are_set_in_the_runners_own_thread() -> None:
    runner = fake_runner(threads=3)
    runner.enter_thread()
    assert torch.get_num_threads() == 3


def test_a_small_model_gets_the_threads_that_it_can_use() -> None:
    assert [useful_threads(n, 8) for n in (1_000_000, 9_000_000, 380_000_000)] == [1, 2, 8]
    torch.set_num_threads(2)
    fake_runner().enter_thread()
    assert torch.get_num_threads() == 1


def test_ranks_of_a_host_share_its_cores(caplog: pytest.LogCaptureFixture) -> None:
    world = World(rank=1, size=64, ranks_on_host=64)
    large = spec_of(vocab_size=1_000_000, hidden_size=64)
    torch.set_num_threads(2)
    with caplog.at_level("INFO"):
        CPUModelRunner(config_of(None), large, Path(), world).enter_thread()
    assert torch.get_num_threads() == 1
    assert "rank 1 computes on 1 of" in caplog.text
    CPUModelRunner(config_of(None, threads=2), large, Path(), world).enter_thread()
    assert torch.get_num_threads() == 2


def test_the_runners_thread_and_those_it_starts_stay_on_the_ranks_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = min(os.sched_getaffinity(0))
    monkeypatch.setattr("moeserve.runner.cpu.assign_cpus", lambda *found: ({here}, 1))
    with ThreadPoolExecutor(1) as pool:  # not this thread
        pool.submit(fake_runner().enter_thread).result()
        with ThreadPoolExecutor(1) as inner:
            started = pool.submit(lambda: inner.submit(os.sched_getaffinity, 0).result())
            assert pool.submit(os.sched_getaffinity, 0).result() == started.result() == {here}
        assert pool.submit(torch.get_num_threads).result() == 1


def test_memory_is_shared_among_the_ranks_of_a_host() -> None:
    """Each of four counts on a fourth."""
    budgets = []
    for ranks in (1, 4):
        world = World(size=ranks, ranks_on_host=ranks, ep=False)
        runner = FakeRunner(config_of(None), spec_of(), Path(), world)
        budgets.append(runner.load(lambda name, percent: None))
    assert 0 < budgets[1] <= budgets[0] / 3


def test_what_others_take_of_a_shared_device_does_not_count_as_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks share a GPU of 140: this one uses 30, the other one 60 or nothing yet.

    If the rank is alone, all used memory counts.
    """
    facts = {"memory_allocated": 30, "memory_reserved": 32}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    budgets = {}
    for num_ranks, taken in ((2, 92), (2, 32), (1, 92)):
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device, taken=taken: (140 - taken, 140)
        )
        runner = GPUModelRunner(config_of(None), spec_of(), Path())
        runner.device = torch.device("cuda", 0)
        runner.properties = DeviceProperties(
            "fake", runner._memory, exclusive=True, num_ranks=num_ranks
        )
        budgets[num_ranks, taken] = kv_budget(runner.properties.memory().shared(num_ranks), 0.9, 10)
    assert budgets == {(2, 92): 12, (2, 32): 23, (1, 92): 26}


def test_a_quota_of_the_control_group_counts(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "membership").write_text("0::/a\n")
    assert allowed_cores(tmp_path, tmp_path / "membership") == 1
    (tmp_path / "a" / "cpu.max").write_text("max 100000\n")
    assert (
        allowed_cores(tmp_path, tmp_path / "membership")
        == allowed_cores(tmp_path, tmp_path / "missing")
        >= 1
    )


def test_what_is_meant_for_gpus_is_refused_on_cpus() -> None:
    with pytest.raises(
        ConfigError, match=r"comm_sms=24 .* runs on CPUs; omit it, or use --device cuda"
    ):
        make_runner(config_of(None, comm_sms=24, device="cpu"), spec_of(), Path())
    for wrong in (0, 133):
        with pytest.raises(ConfigError, match=f"comm_sms: must be from 1 to 132, got {wrong}"):
            config_of(None, comm_sms=wrong)


def test_what_cuda_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="block_size=192 must divide 512 on CUDA"):
        make_runner(config_of(None, block_size=192), spec_of(), Path())
    for settings in (
        {"determinism": "batch"},
        {"kv_cache_dtype": "int8"},
        {"kernels": "torch", "block_size": 192},
    ):
        assert type(make_runner(config_of(None, **settings), spec_of(), Path())) is GPUModelRunner
    assert factory.SPLIT_LEN == SPLIT
    with pytest.raises(ConfigError, match="tp=2: this build of torch has no NCCL"):
        make_runner(config_of(None), spec_of(), Path(), World(size=2, tp_size=2))
    with pytest.raises(ConfigError, match=r"compile with determinism=full: .* omit one of them"):
        make_runner(config_of(None, compile=True, determinism="full"), spec_of(), Path())
    with pytest.raises(ConfigError, match="compile is for CUDA"):
        make_runner(config_of(None, compile=True, device="cpu"), spec_of(), Path())
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError,
        match="one GPU per rank, and 2 ranks share 1 here; use fewer ranks, or --device cpu",
    ):
        make_runner(config_of(None), spec_of(), Path(), World(size=2, tp_size=2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    runner = make_runner(config_of(None), spec_of(), Path(), World(size=2, tp_size=2))
    assert type(runner.tp) is DeviceTensor
    assert (
        type(make_runner(config_of(None, determinism="batch", device="cpu"), spec_of(), Path()))
        is CPUModelRunner
    )


def test_tokens_per_step_leave_room_for_prompts_beside_all_who_decode() -> None:
    for asked, expected in (
        ({}, 512),
        ({"max_num_seqs": 1000}, 1256),
        ({"max_num_batched_tokens": 64}, 64),
    ):
        config = with_step_tokens(config_of("demo", **asked), CPUModelRunner.busy_tokens)
        assert step_tokens(config) == chunk_tokens(config) == expected
