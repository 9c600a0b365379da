"""Builds what an engine runs: from settings to a runner with its weights in memory, and the facts about it."""

from __future__ import annotations

import asyncio
import os
import time

import msgspec

from moeserve.config import Config, Limits
from moeserve.engine.groups import KVGroup, groups_of
from moeserve.engine.null_runner import NullRunner
from moeserve.launch.assemble import Built, Progress
from moeserve.loader.hf_config import read_model_spec
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.loader.size import ModelSize, model_size
from moeserve.loader.spec import ModelSpec
from moeserve.messages import Ready

NULL_RUNNER_BYTES = 1 << 40  # no KV is ever allocated: only max_num_seqs and max_model_len count


def build_runner(config: Config, progress: Progress) -> Built:
    """Runner, limits, facts for the front end, KV groups and end-of-text ids.

    Slow (imports torch, reads weights): call it in a thread. Raises ConfigError with what to change.
    """
    began_s = time.monotonic()
    progress("reading the model's configuration", 2)
    model_dir = resolve_model_dir(config.model.model)
    spec = read_model_spec(model_dir)
    if config.device.null_runner:
        return _null(config, spec, began_s)
    from moeserve.runner.factory import make_runner
    from moeserve.runner.thread import ThreadedRunner

    runner = make_runner(config, spec, model_dir)
    threaded = ThreadedRunner(runner)
    try:
        limits = asyncio.run(threaded.call(runner.prepare, progress))  # in the thread that will run it
    except BaseException:
        threaded.close()
        raise
    dtype = str(runner.dtype).removeprefix("torch.")
    ready = _ready(spec, limits, dtype, runner.properties.name, began_s, runner.notes)
    ready = msgspec.structs.replace(ready, step_s=runner.step_s)
    return threaded, limits, ready, runner.groups, spec.eos_token_ids


def _null(config: Config, spec: ModelSpec, began_s: float) -> Built:
    from moeserve.runner.limits import check, resolve

    check(config, spec)
    groups: tuple[KVGroup, ...] = groups_of((None,), config.cache.block_size)
    limits, notes = resolve(config, spec, groups, config.cache.block_size, NULL_RUNNER_BYTES, fill=False)
    ready = _ready(spec, limits, spec.dtype, "null", began_s, notes)
    return NullRunner(spec.vocab_size, step_s=config.device.null_step_ms / 1e3), limits, ready, groups, ()


def _ready(
    spec: ModelSpec, limits: Limits, dtype: str, device: str, began_s: float, notes: list[str] | tuple[str, ...]
) -> Ready:
    size: ModelSize = model_size(spec)
    return Ready(
        pid=os.getpid(),
        architecture=spec.architecture,
        dtype=dtype,
        device=device,
        vocab_size=spec.vocab_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        eos_token_ids=spec.eos_token_ids,
        num_params=size.total,
        num_active_params=size.active,
        weight_bytes=size.total * (4 if dtype == "float32" else 2),
        startup_s=time.monotonic() - began_s,
        notes=tuple(notes),
    )
