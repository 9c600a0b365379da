"""The facts of several engines as those of one."""

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
    """Capacities add up; a request must fit wherever it goes. Raises ConfigError if the models are not the same."""
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
        max_model_len=min(one.max_model_len for one in facts),
        max_num_seqs=sum(one.max_num_seqs for one in facts),
        num_blocks=1 + sum(one.num_blocks - 1 for one in facts),  # each has a null block
        startup_s=max(one.startup_s for one in facts),
        step_s=max(one.step_s for one in facts),
        notes=tuple(dict.fromkeys(note for one in facts for note in one.notes)),
    )


def labelled(msg: FromOne, rank: int) -> FromOne:
    """What an engine says of itself, under its rank in the fleet: with ep off, each is rank 0 of a group of its own."""
    if isinstance(msg, Traced):
        return msgspec.structs.replace(msg, dp_rank=rank)
    if msg.record is None or msg.record.dp_rank == rank:
        return msg
    return msgspec.structs.replace(msg, record=msgspec.structs.replace(msg.record, dp_rank=rank))


def slowest(phases: Sequence[Phase]) -> Phase:
    """How far a start is: as far as the engine that is least far."""
    return min(phases, key=lambda phase: phase.percent)
