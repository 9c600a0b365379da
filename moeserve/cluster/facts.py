"""Combines the facts and messages of several engines into those of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from moeserve.errors import ConfigError
from moeserve.messages import Phase, Ready, StepOutput, Traced

FromOne = TypeVar("FromOne", StepOutput, Traced)

_EQUAL = (
    "version", "architecture", "dtype", "vocab_size", "block_size", "eos_token_ids", "num_params", "num_moe_layers",
    "num_experts", "checkpoint",
)  # fmt: skip


def combined(facts: Sequence[Ready]) -> Ready:
    """Returns the facts of all engines together: capacities add up, limits are the smallest.

    Raises ConfigError if the models are not the same.
    """
    first = facts[0]
    for other in facts[1:]:
        for name in _EQUAL:
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                raise ConfigError(
                    f"the engines disagree: {name} is {ours!r} in process {first.pid}, {theirs!r} in {other.pid}; "
                    "the model's files are not the same on all machines, or changed since the first of them read them"
                )
    return msgspec.structs.replace(
        first,
        max_model_len=min(engine.max_model_len for engine in facts),
        max_num_seqs=sum(engine.max_num_seqs for engine in facts),
        num_blocks=1 + sum(engine.num_blocks - 1 for engine in facts),  # each has a null block
        startup_s=max(engine.startup_s for engine in facts),
        step_s=max(engine.step_s for engine in facts),
        notes=tuple(dict.fromkeys(note for engine in facts for note in engine.notes)),
    )


def labelled(msg: FromOne, rank: int) -> FromOne:
    """Returns a message under the engine's rank in the fleet: with ep off, each is rank 0 of a group of its own."""
    if isinstance(msg, Traced):
        return msgspec.structs.replace(msg, dp_rank=rank)
    if msg.record is None or msg.record.dp_rank == rank:
        return msg
    return msgspec.structs.replace(msg, record=msgspec.structs.replace(msg.record, dp_rank=rank))


def slowest(phases: Sequence[Phase]) -> Phase:
    """Returns the phase of the engine that is least far."""
    return min(phases, key=lambda phase: phase.percent)
