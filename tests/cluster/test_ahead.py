"""Engine processes started ahead of the server: ownership, and their end if nobody uses them."""

import psutil
import pytest

from moeserve.cluster.ahead import early_engine, take_early_process
from moeserve.config import Config, DeviceConfig, ParallelConfig


def test_a_process_that_nobody_takes_ends() -> None:
    us = psutil.Process()
    before = us.children()  # of other tests
    with early_engine(Config()):
        (child,) = (child for child in us.children() if child not in before)
        assert "moeserve.cluster.engine_main" in child.cmdline()
    assert not child.is_running()
    assert take_early_process() is None


def test_a_process_is_taken_once_and_lives_on() -> None:
    with early_engine(Config()):
        process = take_early_process()
        assert process is not None
        assert take_early_process() is None
    assert process.poll() is None
    with process:
        process.kill()


@pytest.mark.parametrize(
    "config",
    [
        Config(parallel=ParallelConfig(dp=2)),
        Config(parallel=ParallelConfig(standby=True)),
        Config(device=DeviceConfig(null_runner=True)),
    ],
    ids=["a fork server starts several", "the root process starts them", "no libraries needed"],
)
def test_others_begin_none(config: Config) -> None:
    with early_engine(config):
        assert take_early_process() is None
