"""A plan as bytes, for the other processes of an engine, which execute the same plans as the one that makes them."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeserve.engine.plan import I32, Agreed, BlockDiff, BlockMove, NewRequest, StepPlan
from moeserve.sampling import TokenSampling


class _Added(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    tokens: bytes
    num_prompt: int
    sampling: TokenSampling


class _Plan(msgspec.Struct, frozen=True, array_like=True):
    """Arrays are little-endian int32: rows [3, R] of slots, starts and counts; a diff [3, N]; moves [n, 2]."""

    step: int
    rows: bytes
    samples: bytes
    diffs: tuple[bytes, ...]
    new_requests: tuple[_Added, ...]
    stores: bytes
    loads: bytes
    split_at: int
    agreed: Agreed | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Plan).decode


def encode_plan(plan: StepPlan) -> bytes:
    """What `decode_plan` makes the same plan of."""
    return _encode(
        _Plan(
            step=plan.step,
            rows=_bytes(plan.slots_R, plan.starts_R, plan.counts_R),
            samples=plan.samples_R.tobytes(),
            diffs=tuple(_bytes(diff.slots_N, diff.indices_N, diff.blocks_N) for diff in plan.diffs),
            new_requests=tuple(
                _Added(one.slot, _bytes(one.tokens), one.num_prompt, one.sampling) for one in plan.new_requests
            ),
            stores=_moves(plan.stores),
            loads=_moves(plan.loads),
            split_at=plan.split_at,
            agreed=plan.agreed,
        )
    )


def decode_plan(data: bytes) -> StepPlan:
    """Raises ValueError (msgspec's are such) for bytes that are no plan."""
    plan = _decode(data)
    slots_R, starts_R, counts_R = _array(plan.rows).reshape(3, -1)
    return StepPlan(
        step=plan.step,
        slots_R=slots_R,
        starts_R=starts_R,
        counts_R=counts_R,
        samples_R=np.frombuffer(plan.samples, np.bool_),
        diffs=tuple(BlockDiff(*_array(diff).reshape(3, -1)) for diff in plan.diffs),
        new_requests=tuple(
            NewRequest(one.slot, _array(one.tokens), one.num_prompt, one.sampling) for one in plan.new_requests
        ),
        stores=_pairs(plan.stores),
        loads=_pairs(plan.loads),
        split_at=plan.split_at,
        agreed=plan.agreed,
    )


def _bytes(*columns: NDArray[np.int32]) -> bytes:
    return b"".join(column.astype("<i4", copy=False).tobytes() for column in columns)


def _array(data: bytes) -> I32:
    # A copy: tensors are made of these arrays, and torch wants memory that it may write to.
    return np.frombuffer(data, "<i4").astype(np.int32)


def _moves(moves: tuple[BlockMove, ...]) -> bytes:
    return np.array([(move.block, move.host_block) for move in moves], dtype="<i4").tobytes()


def _pairs(data: bytes) -> tuple[BlockMove, ...]:
    return tuple(BlockMove(block, host_block) for block, host_block in _array(data).reshape(-1, 2).tolist())
