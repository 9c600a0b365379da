"""The state machine of one engine: every event, in every order that may come."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from moeserve.cluster.engine_state import (
    EngineState,
    Held,
    JoinSent,
    LeftFleet,
    NewRequestsEnded,
    WireLost,
)
from moeserve.cluster.link import EngineGone
from moeserve.messages import Joined, LeftGroup, Phase, Ready, Stopped

NEW = EngineState(rank=3, host="node-1", machine=1, grouped=True, held=True)
ALONE = EngineState(rank=0, host="node-0", machine=0)
READY = Ready(
    pid=7,
    architecture="null",
    dtype="float32",
    device="none",
    vocab_size=10,
    max_model_len=10,
    max_num_seqs=1,
    num_blocks=10,
    block_size=16,
    eos_token_ids=(),
    num_params=0,
    num_active_params=0,
    weight_bytes=0,
    startup_s=0.0,
)
RESTARTING = EngineGone(exit_code=-9, cause="killed", restart_in_s=0.1)
FINAL = EngineGone(exit_code=2, cause="a wrong setting")


def after(state: EngineState, *events: Any) -> EngineState:
    for event in events:
        state = state.after(event)
    return state


SERVING = after(NEW, READY, JoinSent(), Joined(epoch=5, took_s=0.1), Held(False))


def test_a_start_in_a_group_serves_when_all_have_met() -> None:
    labels = [NEW.label]
    state = NEW
    for event in (Phase("loading", 10, 1.0), READY, JoinSent(), Joined(5, 0.1)):
        state = state.after(event)
        labels.append(state.label)
    assert labels == ["loading", "loading", "waiting", "waiting", "serving"]
    assert not state.serving  # the others have not joined yet
    assert state.after(Held(False)).serving


def test_an_engine_without_a_group_is_never_held() -> None:
    state = after(ALONE, READY, Held(True), Joined(1, 0.0))
    assert state.serving


def test_a_lost_process_leaves_nothing_that_belonged_to_it() -> None:
    lost = after(SERVING, NewRequestsEnded(ordered=False), WireLost())
    assert (lost.ready, lost.epoch, lost.left_group, lost.draining) == (None, 0, None, False)
    assert lost.held
    assert not lost.has_served
    again = lost.after(RESTARTING)
    assert (again.restarts, again.label) == (1, "lost")
    assert again.loaded  # a later start may fail without ending the fleet


def test_the_final_end_stays() -> None:
    gone = after(SERVING, WireLost(), FINAL)
    assert (gone.end, gone.label, gone.up) == (FINAL, "gone", False)


def test_an_old_epochs_notice_does_not_part_an_engine_from_a_newer_one() -> None:
    assert SERVING.after(LeftGroup(4, "too late")) == SERVING
    left = SERVING.after(LeftGroup(5, "rank 2 is gone"))
    assert (left.epoch, left.serving) == (0, False)
    assert left.after(JoinSent()).left_group is None


def test_only_an_ordered_stop_is_obedience() -> None:
    assert SERVING.after(Stopped("")).ended_by_order
    assert not SERVING.after(Stopped("out of memory")).ended_by_order
    assert SERVING.after(NewRequestsEnded(ordered=True)).stop_ordered
    sigterm = SERVING.after(NewRequestsEnded(ordered=False))
    assert (sigterm.draining, sigterm.stop_ordered) == (True, False)


EVENTS = st.sampled_from(
    [
        Phase("loading", 50, 1.0),
        READY,
        JoinSent(),
        Joined(5, 0.1),
        Joined(6, 0.1),
        LeftGroup(5, "why"),
        Held(True),
        Held(False),
        NewRequestsEnded(ordered=True),
        NewRequestsEnded(ordered=False),
        LeftFleet(),
        Stopped(""),
        Stopped("why"),
        WireLost(),
        RESTARTING,
        FINAL,
    ]
)


@given(st.lists(EVENTS, max_size=30), st.sampled_from([NEW, ALONE]))
def test_what_serves_has_a_process_an_epoch_and_no_reason_to_wait(
    events: list[Any], start: EngineState
) -> None:
    state = start
    for event in events:
        before = msgspec.structs.asdict(state)
        following = state.after(event)
        assert msgspec.structs.asdict(state) == before
        state = following
        if state.serving:
            assert state.label == "serving"
            assert state.ready is not None
            assert state.epoch
            assert state.end is None
        assert state.restarts <= events.count(RESTARTING)
        assert not (state.held and not state.grouped)
