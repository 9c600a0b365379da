"""Resolves the configuration to the limits that scheduler and runner obey, given the model and the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moeserve.config import INT4_GROUPS, Config, Limits
from moeserve.engine.blocks import KVGroup
from moeserve.errors import ConfigError
from moeserve.loader.spec import ModelSpec
from moeserve.models import workspace as model_workspace
from moeserve.runner.memory import KVAsked, KVPlan, plan_kv
from moeserve.runner.sampling.logprobs import PROMPT_ELEMENTS
from moeserve.runner.sampling.reference import CHUNK_ELEMENTS

_F32 = 4  # bytes
ROOM = 256  # tokens of prompts in a step in which all requests that may run decode, at least
TILE = 64  # tokens: attention works on tiles of this many, so that blocks must divide them or be made of them


def check(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError for settings that are wrong whatever memory there is; to be called before loading weights."""
    size, asked_len = config.cache.block_size, config.model.max_model_len
    if TILE % size and size % TILE:
        raise ConfigError(f"block_size={size} must divide {TILE} or be a multiple of it, e.g. 16, 32 or 64")
    if asked_len is not None and asked_len > spec.max_position:
        raise ConfigError(
            f"max_model_len={asked_len} is more than the model's own limit of {spec.max_position} positions "
            f"(max_position_embeddings in config.json). Ask for at most {spec.max_position}."
        )
    if config.model.packed_cache == "":
        raise ConfigError("packed_cache is '' and names no folder; name one, or leave it out")
    _check_quantization(config.model.quantization, spec)


def _check_quantization(asked: str, spec: ModelSpec) -> None:
    if asked == "none":
        return
    if spec.stored is not None:
        raise ConfigError(
            f"quantization={asked}, but the checkpoint's weights are {spec.stored.kind} already; leave it at none"
        )
    widths = [spec.hidden_size, spec.num_heads * spec.head_dim, spec.expert_size, spec.shared_expert_size]
    widths += [] if all(spec.moe_layers) else [spec.intermediate_size]
    odd = sorted({width for width in widths if width % INT4_GROUPS[-1]})
    if asked == "int4" and odd:
        raise ConfigError(
            f"quantization=int4 has a scale for every {INT4_GROUPS[-1]} inputs or more, and this model has layers with "
            f"{', '.join(map(str, odd))} inputs, which no multiple of {INT4_GROUPS[-1]} is; use quantization=int8"
        )


def with_step_tokens(config: Config, least: int) -> Config:
    """Returns the config with the number of tokens per step filled in. least: tokens that keep the device busy; more
    would only delay requests that decode in the same step."""
    if config.scheduler.max_num_batched_tokens is not None:
        return config
    tokens = max(least, config.scheduler.max_num_seqs + ROOM)
    return replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=tokens))


def step_tokens(config: Config) -> int:
    """Returns the most tokens per step."""
    tokens = config.scheduler.max_num_batched_tokens
    assert tokens is not None, "with_step_tokens first"
    return tokens


def chunk_tokens(config: Config) -> int:
    """Returns the most tokens of one request per step."""
    return min(config.scheduler.prefill_chunk or step_tokens(config), step_tokens(config))


def resolve(
    config: Config, spec: ModelSpec, groups: Sequence[KVGroup], bytes_per_block: int, budget: int, *, fill: bool
) -> tuple[Limits, tuple[str, ...]]:
    """Returns the limits and notes about them for the user. budget: bytes for KV blocks.

    fill: take the whole budget (a device of our own) rather than what the requests can use (a shared host).
    """
    asked = KVAsked(
        kv_cache_bytes=config.cache.kv_cache_bytes,
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        chunk=chunk_tokens(config),
        watermark=config.scheduler.watermark,
        fill=fill,
    )
    plan: KVPlan = plan_kv(asked, groups, bytes_per_block, budget, spec.max_position)
    limits = Limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=step_tokens(config),
        prefill_chunk=chunk_tokens(config),
        max_model_len=plan.max_model_len,
        block_size=config.cache.block_size,
        num_blocks=plan.num_blocks,
        watermark_blocks=plan.watermark_blocks,
        depth=config.scheduler.depth,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_store_blocks=config.cache.host_store_bytes // bytes_per_block,
    )
    return limits, plan.notes


def workspace_bytes(
    spec: ModelSpec, config: Config, dtype: torch.dtype, inflow: model_workspace.Inflow | None = None
) -> int:
    """Returns the bytes of a forward pass of a full step, all requests' logits in fp32 with one copy, and the
    sampler's chunks.

    inflow: what other ranks send here, None where experts compute for this rank alone.
    """
    tokens = step_tokens(config)
    rows = min(config.scheduler.max_num_seqs, tokens)
    max_len = config.model.max_model_len or spec.max_position
    forward = model_workspace.workspace_bytes(spec, tokens, rows, max_len, dtype, config.parallel.tp, inflow)
    logits = 2 * max(rows * spec.vocab_size, PROMPT_ELEMENTS)
    return forward + _F32 * (logits + 8 * 4 * CHUNK_ELEMENTS)
