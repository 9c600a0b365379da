"""A plan that went through bytes is the plan that it was."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.engine.plan import (
    BlockDiff,
    BlockMove,
    NewRequest,
    StepDecision,
    StepPlan,
    decode_plan,
    encode_plan,
)
from moeserve.sampling import TokenSampling

INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)
MOVES = st.lists(st.builds(BlockMove, COUNT, COUNT), max_size=3).map(tuple)
SAMPLINGS = st.builds(
    TokenSampling,
    seed=st.integers(0, 2**63 - 1),
    max_tokens=COUNT,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=COUNT,
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.none() | st.dictionaries(COUNT, st.floats(-100, 100), max_size=3),
    processors=st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=2).map(tuple),
)


def arrays(length: int, values: Any) -> Any:
    return st.lists(values, min_size=length, max_size=length).map(
        lambda column: np.array(column, dtype=np.int32)
    )


@st.composite
def plans(draw: Any) -> StepPlan:
    rows = draw(st.integers(0, 5))
    entries = draw(st.lists(st.integers(0, 4), max_size=3))
    return StepPlan(
        step=draw(st.integers(0, 2**62)),
        slots_R=draw(arrays(rows, COUNT)),
        starts_R=draw(arrays(rows, COUNT)),
        counts_R=draw(arrays(rows, st.integers(1, 2**31 - 1))),
        samples_R=np.array(
            draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=np.bool_
        ),
        diffs=tuple(BlockDiff(*(draw(arrays(n, COUNT)) for _ in range(3))) for n in entries),
        new_requests=tuple(
            NewRequest(
                draw(COUNT),
                draw(arrays(draw(st.integers(0, 4)), INT32)),
                draw(COUNT),
                draw(SAMPLINGS),
            )
            for _ in range(draw(st.integers(0, 2)))
        ),
        stores=draw(MOVES),
        loads=draw(MOVES),
        num_drafts_R=draw(st.none() | arrays(rows, COUNT)),
        propose=draw(st.booleans()),
        split_at=draw(COUNT),
        decision=draw(
            st.none()
            | st.builds(
                StepDecision,
                step=COUNT,
                ubatches=st.integers(1, 2),
                most_tokens=st.tuples(COUNT, COUNT),
                active=COUNT,
                trace=st.booleans(),
            )
        ),
    )


def same(ours: Any, theirs: Any) -> None:
    """Equal in type, dtype, shape and value, all the way down."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert (ours == theirs).all()
    elif isinstance(ours, tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same(a, b)
    elif is_dataclass(ours):
        for f in fields(ours):
            same(getattr(ours, f.name), getattr(theirs, f.name))
    else:
        assert ours == theirs


@settings(max_examples=150, deadline=None)
@given(plans())
def test_a_plan_comes_back_as_it_went(plan: StepPlan) -> None:
    same(decode_plan(encode_plan(plan)), plan)


def test_every_field_of_a_plan_travels() -> None:
    """A field that the codec forgets would come back with its default."""
    one = np.ones(1, dtype=np.int32)
    plan = StepPlan(
        step=7,
        slots_R=one,
        starts_R=one,
        counts_R=one,
        samples_R=np.ones(1, dtype=np.bool_),
        diffs=(BlockDiff(one, one, one),),
        new_requests=(NewRequest(1, one, 1, TokenSampling(seed=1, max_tokens=1)),),
        stores=(BlockMove(1, 2),),
        loads=(BlockMove(3, 4),),
        num_drafts_R=one,
        drafts_N=one,
        propose=True,
        split_at=1,
        decision=StepDecision(1),
    )
    came = decode_plan(encode_plan(plan))
    for f in fields(StepPlan):
        assert bool(np.any(getattr(plan, f.name))), (
            f"give {f.name} a value here that is not its default"
        )
        same(getattr(came, f.name), getattr(plan, f.name))


def test_arrays_can_be_written_to() -> None:
    """torch warns about tensors over memory that it must not write to."""
    one = np.ones(1, dtype=np.int32)
    plan = StepPlan(
        1,
        one,
        one,
        one,
        np.ones(1, np.bool_),
        (),
        (NewRequest(0, one, 1, TokenSampling(seed=1, max_tokens=1)),),
    )
    came = decode_plan(encode_plan(plan))
    assert all(
        array.flags.writeable
        for array in (came.slots_R, came.counts_R, came.new_requests[0].tokens)
    )


def test_bytes_that_are_no_plan_are_refused() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    whole = encode_plan(StepPlan(1, nothing, nothing, nothing, np.zeros(0, np.bool_), ()))
    for data in (b"", b"\x90", b"\x80", b"\xc1", whole[:-1], whole + b"\x00"):
        with pytest.raises(ValueError, match=r"."):
            decode_plan(data)
