"""Builders of engine processes under test: a null runner in the real core, or a failing start."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from moeserve.cluster.assemble import Built
from moeserve.cluster.order import Role
from moeserve.config import Config, Limits
from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.null_runner import NullHandle, NullRunner
from moeserve.engine.plan import StepPlan, StepResult
from moeserve.errors import DoesNotFit, PeerLost
from moeserve.messages import Join, Ready

Progress = Callable[[str, int], None]


def null(config: Config, role: Role, progress: Progress, runner: Any = None) -> Built:
    progress("making tokens up", 50)
    limits = Limits(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        prefill_chunk=64,
        max_model_len=100_000,
        block_size=16,
        num_blocks=10_000,
    )
    ready = Ready(
        pid=os.getpid(),
        architecture="null",
        dtype="float32",
        device="none",
        vocab_size=1000,
        max_model_len=100_000,
        max_num_seqs=8,
        num_blocks=10_000,
        block_size=16,
        eos_token_ids=(),
        num_params=0,
        num_active_params=0,
        weight_bytes=0,
        startup_s=0.0,
        notes=(config.model.model,),
    )
    return runner or NullRunner(), limits, ready, (KVGroup(KVRule(), 16, (0,)),), ()


def imports_torch(config: Config, role: Role, progress: Progress) -> Built:
    assert "torch" not in sys.modules
    return null(config, role, progress)


def too_large(config: Config, role: Role, progress: Progress) -> Built:
    raise DoesNotFit("needs 80 GiB, has 1 GiB")


def crash(config: Config, role: Role, progress: Progress) -> Built:
    raise ValueError("a bug")


def slow(config: Config, role: Role, progress: Progress) -> Built:
    """Load forever, reporting progress."""
    while True:
        progress("loading", 10)
        time.sleep(0.02)


def hang(config: Config, role: Role, progress: Progress) -> Built:
    """Load forever without progress, inside a native call that holds the GIL."""
    ctypes.PyDLL(None).sleep(1000)
    raise AssertionError


class EndlessRunner(NullRunner):
    """Steps take a moment, so that a long request runs while something else happens."""

    def start(self, plan: StepPlan) -> Any:
        return _Late(super().start(plan), 0.005)


class WaitingRunner(NullRunner):
    """The third step never ends, while the process stays responsive."""

    def start(self, plan: StepPlan) -> Any:
        return _Late(super().start(plan), 1000.0 if plan.step >= 3 else 0.0)


class FailingRunner(NullRunner):
    """The third step raises."""

    def start(self, plan: StepPlan) -> Any:
        return _Late(
            super().start(plan), 0.0, OSError("the device is on fire") if plan.step >= 3 else None
        )


class _Late:
    def __init__(self, handle: NullHandle, delay_s: float, error: Exception | None = None) -> None:
        self._handle = handle
        self._delay_s = delay_s
        self._error = error

    async def result(self) -> StepResult:
        await asyncio.sleep(self._delay_s)
        if self._error is not None:
            raise self._error
        return await self._handle.result()


def endless(config: Config, role: Role, progress: Progress) -> Built:
    return null(config, role, progress, EndlessRunner())


def slow_steps(config: Config, role: Role, progress: Progress) -> Built:
    """Each step takes longer than the link waits for engines that have not announced it."""

    class Slow(NullRunner):
        def start(self, plan: StepPlan) -> Any:
            return _Late(super().start(plan), 0.6)

    runner, limits, ready, groups, ends = null(config, role, progress, Slow())
    return runner, limits, msgspec.structs.replace(ready, step_s=0.6), groups, ends


def frozen(config: Config, role: Role, progress: Progress) -> Built:
    class Checking(NullRunner):
        def start(self, plan: StepPlan) -> Any:
            assert gc.get_freeze_count() > 10_000
            return super().start(plan)

    return null(config, role, progress, Checking())


def waiting(config: Config, role: Role, progress: Progress) -> Built:
    return null(config, role, progress, WaitingRunner())


def failing(config: Config, role: Role, progress: Progress) -> Built:
    return null(config, role, progress, FailingRunner())


class StuckRunner(NullRunner):
    """The third step blocks the whole process in native code that holds the GIL."""

    def start(self, plan: StepPlan) -> NullHandle:
        if plan.step >= 3:
            ctypes.PyDLL(None).sleep(1000)
        return super().start(plan)


def stuck(config: Config, role: Role, progress: Progress) -> Built:
    return null(config, role, progress, StuckRunner())


class CrashingRunner(NullRunner):
    """The third step kills the process as a segmentation fault would."""

    def start(self, plan: StepPlan) -> NullHandle:
        if plan.step >= 3:
            os.abort()
        return super().start(plan)


def crashing(config: Config, role: Role, progress: Progress) -> Built:
    return null(config, role, progress, CrashingRunner())


class PacedRunner(NullRunner):
    """A step takes two milliseconds. `refusal` returns a reason not to join, or an empty string."""

    def __init__(self, refusal: Callable[[Join], str] = lambda join: "") -> None:
        super().__init__()
        self._refusal = refusal

    def start(self, plan: StepPlan) -> Any:
        return _Late(super().start(plan), 0.002)

    async def join(self, join: Join) -> None:
        if why := self._refusal(join):
            raise PeerLost(why)


def paced(config: Config, role: Role, progress: Progress) -> Built:
    return null(config, role, progress, PacedRunner())


def fingerprinted(config: Config, role: Role, progress: Progress) -> Built:
    """The checkpoint's fingerprint is that in the process's environment."""
    runner, limits, ready, groups, ends = paced(config, role, progress)
    return (
        runner,
        limits,
        msgspec.structs.replace(ready, checkpoint=os.environ["CHECKPOINT"]),
        groups,
        ends,
    )


def nobody_meets(config: Config, role: Role, progress: Progress) -> Built:
    return null(config, role, progress, PacedRunner(lambda join: "no thanks"))


def two_meet(config: Config, role: Role, progress: Progress) -> Built:
    return null(
        config,
        role,
        progress,
        PacedRunner(lambda join: "three is a crowd" if len(join.hosts) == 3 else ""),
    )


def two_only(config: Config, role: Role, progress: Progress) -> Built:
    """A third engine has too little memory."""
    return (
        too_large(config, role, progress)
        if role.world.dp_rank == 2
        else paced(config, role, progress)
    )


def second_crashes(config: Config, role: Role, progress: Progress) -> Built:
    return (
        crash(config, role, progress) if role.world.dp_rank == 1 else paced(config, role, progress)
    )


def newcomers_load_for_ever(config: Config, role: Role, progress: Progress) -> Built:
    """Two engines serve; those of a larger fleet never finish loading."""
    return slow(config, role, progress) if role.world.size > 2 else paced(config, role, progress)
