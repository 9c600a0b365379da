"""The default builder of an engine's runner: load the weights and describe them (`Ready`)."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from moeserve.cluster.assemble import Built, Progress
from moeserve.cluster.order import Role, command_of
from moeserve.cluster.rank import make_rank
from moeserve.config import Config, Limits
from moeserve.engine.blocks import groups_of
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.null_runner import NullRunner
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import Ready
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec, bytes_per_weight, model_size

if TYPE_CHECKING:
    from moeserve.engine.plan import Runner
    from moeserve.runner.base import ModelRunnerBase
    from moeserve.runner.remote import Team

NULL_STEP_TOKENS = 2048
# KV budget of a null runner, which allocates no KV: only max_num_seqs and max_model_len count.
NULL_RUNNER_BYTES = 1 << 40


def build_runner(config: Config, role: Role, progress: Progress) -> Built:
    """Build the runner of an engine; see `Built`.

    This imports torch, reads weights and starts the engine's other ranks, so call it in a thread.
    Raises ConfigError.
    """
    began_at_s = time.monotonic()
    progress("reading the model's configuration", 2)
    spec = read_model_spec(resolve_model_dir(config.model.model))
    if config.device.null_runner:
        return _build_null(config, spec, began_at_s)
    spec.check_tp(role.world.tp_size)  # before any process is started
    build = _build_grouped if role.grouped else _build_single
    threaded, limits, runner = build(config, role, progress)
    ready = _facts_of(
        runner.config,
        spec,
        limits,
        began_at_s,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=runner.properties.name,
        notes=tuple(runner.notes),
        step_s=runner.max_step_s,
        checkpoint=runner.fingerprint,
        numerics=runner.numerics,
    )
    return threaded, limits, ready, runner.groups, spec.eos_token_ids


class RankBuild(NamedTuple):
    """A runner whose model is loaded."""

    threaded: Runner  # the runner that the engine calls; it runs `runner` in a thread
    limits: Limits
    runner: ModelRunnerBase  # of rank 0


def _build_single(config: Config, role: Role, progress: Progress) -> RankBuild:
    from moeserve.runner.thread import ThreadedRunner

    assert role.world.size == 1, "an engine with several ranks must be grouped"
    runner = make_rank(config, role.world, None, grouped=False, folder=role.folder)
    threaded = ThreadedRunner(runner)
    try:
        # Prepare in the thread that will run the model.
        limits = asyncio.run(threaded.call(runner.prepare, progress))
    except BaseException:
        threaded.close()
        raise
    return RankBuild(threaded, limits, runner)


def _build_grouped(config: Config, role: Role, progress: Progress) -> RankBuild:
    with _team(config, role) as team:
        from moeserve.runner.group import GroupedRunner

        runner = make_rank(config, role.world, role.placement, grouped=True, folder=role.folder)
        threaded = GroupedRunner(runner, team)
        try:
            limits = threaded.prepare_model(progress)
        except BaseException:
            threaded.close()
            raise
        return RankBuild(threaded, limits, runner)


@contextmanager
def _team(config: Config, role: Role) -> Iterator[Team | None]:
    """Start the engine's other tensor-parallel ranks, if any. End them if the block fails."""
    if role.world.tp_size == 1:
        yield None
        return
    from moeserve.cluster.tp_worker import WORKER, take_forked
    from moeserve.runner.remote import Team

    folder = os.path.join(role.folder, f"workers-{os.getpid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    team = Team(
        command_of(WORKER),
        folder,
        role.world.tp_size,
        log_level=config.server.log_level,
        log_format=config.server.log_format,
        forked=take_forked(),
    )
    try:
        team.start()
        yield team
    except BaseException:
        team.close()
        raise
    finally:
        # All workers are connected, so the socket's path is not needed any more.
        shutil.rmtree(folder, ignore_errors=True)


def _build_null(config: Config, spec: ModelSpec, began_at_s: float) -> Built:
    from moeserve.runner.limits import check, resolve, with_step_tokens

    check(config, spec)
    groups = groups_of((KVRule(),), config.cache.block_size)
    config = with_step_tokens(config, NULL_STEP_TOKENS)
    limits, notes = resolve(
        config, spec, groups, config.cache.block_size, NULL_RUNNER_BYTES, fill=False
    )
    ready = _facts_of(
        config, spec, limits, began_at_s, dtype=spec.dtype, device="null", notes=tuple(notes)
    )
    runner = NullRunner(spec.vocab_size, step_s=config.device.null_step_ms / 1e3)
    no_eos_ids = ()
    return runner, limits, ready, groups, no_eos_ids


def _facts_of(
    config: Config, spec: ModelSpec, limits: Limits, began_at_s: float, *, dtype: str, **facts: Any
) -> Ready:
    """Return the facts about an engine. facts: further fields of Ready."""
    size = model_size(spec)
    itemsize = 4 if dtype == "float32" else 2
    weight_itemsize = bytes_per_weight(spec, config.model.quantization, itemsize)
    expert_itemsize = weight_itemsize
    num_expert_weights = len(spec.moe_layers) * spec.num_experts * spec.expert_weights
    compression = config.model.lossless_compression
    if compression not in ("auto", "off") and weight_itemsize == 2:
        from moeserve.ops.native_layer import BYTES_IN_12_BITS  # imports torch

        expert_itemsize = BYTES_IN_12_BITS
        if compression == "all":
            weight_itemsize = expert_itemsize
    # The embedding and the LM head, which are not quantized.
    num_head_weights = spec.vocab_size * spec.hidden_size * (1 if spec.tie_embeddings else 2)
    num_other_weights = size.total - num_head_weights - num_expert_weights
    other_bytes = num_other_weights * weight_itemsize + num_expert_weights * expert_itemsize
    return Ready(
        pid=os.getpid(),
        architecture=spec.architecture,
        dtype=dtype,
        vocab_size=spec.vocab_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        eos_token_ids=spec.eos_token_ids,
        num_params=size.total,
        num_active_params=size.active,
        weight_bytes=num_head_weights * itemsize + int(other_bytes),
        startup_s=time.monotonic() - began_at_s,
        num_moe_layers=len(spec.moe_layers),
        num_experts=spec.num_experts,
        expert_bytes=int(spec.expert_weights * expert_itemsize),
        **facts,
    )
