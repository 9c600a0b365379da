"""Hypothesis chooses the order of everything that can happen to a scheduler; the oracle judges the
answers.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moeserve.engine.blocks import STATES_HELD
from tests.engine.harness import (
    ALL_KINDS,
    BAD_GRAMMAR,
    FIRST,
    FULL,
    GRAMMAR,
    HYBRID,
    STATES,
    UNEVEN,
    WINDOWS,
    Harness,
    limits_of,
    submit_of,
)


class SchedulerMachine(RuleBasedStateMachine):
    harness: Harness

    @initialize(
        groups=st.sampled_from([FULL, HYBRID, WINDOWS, STATES, ALL_KINDS, FIRST, UNEVEN]),
        depth=st.integers(1, 3),
        slots=st.integers(1, 3),
        spare=st.sampled_from([0, 1, 4, 30]),
        chunk=st.sampled_from([1, 3, 8, 40]),
        host_blocks=st.sampled_from([0, 3, 20]),
        spare_states=st.sampled_from([0, 1, 20]),
        num_drafts=st.sampled_from([0, 1, 3]),
        late=st.booleans(),
        tears=st.sampled_from([0.0, 0.5]),
    )
    def start(
        self,
        groups: object,
        depth: int,
        slots: int,
        spare: int,
        chunk: int,
        host_blocks: int,
        spare_states: int,
        num_drafts: int,
        late: bool,
        tears: float,
    ) -> None:
        limits = limits_of(
            max_model_len=40,
            num_blocks=11 * len(groups) + spare,  # type: ignore[arg-type]
            depth=depth,
            max_num_seqs=slots,
            max_num_batched_tokens=chunk + 2,
            prefill_chunk=chunk,
            num_store_blocks=host_blocks,
            num_states=STATES_HELD * slots + 1 + spare_states,
            num_store_states=host_blocks // 2,
            num_drafts=num_drafts,
        )
        self.harness = Harness(limits, groups, random.Random(1), late=late)  # type: ignore[arg-type]
        self.harness.runner.tears = tears
        self.next_rid = 0

    @rule(
        stem=st.sampled_from([2, 3]),
        length=st.integers(1, 25),
        tail=st.integers(20, 23),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "s"]),
        stop=st.sampled_from([(), (1, 5, 9, 13, 17)]),
        grammar=st.sampled_from([None, None, GRAMMAR, BAD_GRAMMAR]),
    )
    def submit(
        self,
        stem: int,
        length: int,
        tail: int,
        max_tokens: int,
        priority: int,
        salt: str,
        stop: tuple[int, ...],
        grammar: object,
    ) -> None:
        prompt = [20 + stem + i % 5 for i in range(length)] + [tail]
        sampling = {"seed": 1, "max_tokens": max_tokens, "stop_ids": stop, "grammar": grammar}
        self.harness.submit(
            submit_of(self.next_rid, prompt, priority=priority, salt=salt, **sampling)
        )
        self.next_rid += 1

    @rule(pick=st.integers(0, 30))
    def abort(self, pick: int) -> None:
        still_open = [rid for rid, answer in self.harness.answers.items() if not answer.finish]
        if still_open:
            self.harness.abort(still_open[pick % len(still_open)])

    @precondition(lambda self: self.harness.grammars.jobs)
    @rule(pick=st.integers(0, 30))
    def finish_grammar(self, pick: int) -> None:
        tickets = list(self.harness.grammars.jobs)
        self.harness.finish_grammar(tickets[pick % len(tickets)])

    @rule()
    def plan(self) -> None:
        if len(self.harness.in_flight) < self.harness.limits.depth:
            self.harness.plan()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def update_from_output(self) -> None:
        self.harness.update_from_output()

    @rule(turns=st.integers(1, 6))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.harness.step()

    @rule()
    def reset(self) -> None:
        self.harness.reset()

    @rule()
    def start_over(self) -> None:
        self.harness.start_over()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run()
            self.harness.check_answers()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
