"""Drive a scheduler and the fake model through random traffic; compare answers with the oracle."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moeserve.config import Limits
from moeserve.engine.blocks import STATES_HELD, Key, KVGroup, groups_of
from moeserve.engine.kv_cache_manager import chain, root_of
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.plan import GrammarJob, StepPlan
from moeserve.engine.scheduler import Scheduler
from moeserve.messages import FinishReason, Logprobs, StepOutput, StepRecord, Submit
from moeserve.sampling import GrammarSpec, TokenSampling
from tests.engine.fake_model import (
    POISON,
    U64,
    VOCAB,
    FakeModelRunner,
    First,
    layers,
    oracle,
    score,
    states,
)
from tests.engine.late_store import LateStore

EOS = 1
GRAMMAR = GrammarSpec("regex", "a*")
BAD_GRAMMAR = GrammarSpec("regex", "(")  # does not compile
FULL = groups_of((KVRule(),), 4)
HYBRID = groups_of((KVRule(), KVRule(6)), 4)
WINDOWS = groups_of((KVRule(6), KVRule(11)), 4)
STATES = groups_of((KVRule(), KVRule(tile=4)), 4)
FIRST = groups_of((KVRule(), First(entries=6)), 4)
UNEVEN = groups_of((KVRule(tile=2), First(entries=12), KVRule(6), KVRule(), First(entries=1)), 4)
ALL_KINDS = groups_of((KVRule(tile=2), KVRule(), KVRule(6)), 4)


def limits_of(**changes: int | bool) -> Limits:
    """Return a small engine's limits: 4 slots, blocks of 4 tokens, context of 64."""
    values: dict[str, int | bool] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "prefill_chunk": 24,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 60,
        **changes,
    }
    values.setdefault("num_states", STATES_HELD * values["max_num_seqs"] + 1)
    return Limits(**values)  # type: ignore[arg-type]


def submit_of(
    rid: int,
    prompt: list[int],
    *,
    priority: int = 0,
    salt: str = "",
    emitted: int = 0,
    **sampling: object,
) -> Submit:
    """Return a Submit. The last `emitted` tokens of `prompt` are an earlier answer (a replay)."""
    values: dict[str, object] = {"seed": rid, "max_tokens": 8, **sampling}
    return Submit(
        rid=rid,
        tokens=np.array(prompt, "<i4").tobytes(),
        num_prompt=len(prompt) - emitted,
        sampling=TokenSampling(**values),  # type: ignore[arg-type]
        priority=priority,
        salt=salt,
    )


def extras_of(salt: str) -> dict[str, bytes]:
    return {"salt": salt.encode()} if salt else {}


@dataclass
class Answer:
    msg: Submit
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    stop_id: int | None = None
    cached: int | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_scores: dict[int, Logprobs] = field(default_factory=dict)
    error: str = ""

    @property
    def prompt(self) -> list[int]:
        return np.frombuffer(self.msg.tokens, "<i4").tolist()


class SlowGrammars:
    """A GrammarSource whose jobs end when the test says so, in any order."""

    def __init__(self) -> None:
        self.jobs: dict[int, GrammarJob] = {}  # started
        self.prepared: dict[int, GrammarJob] = {}  # finished, not yet used or dropped

    def begin(self, job: GrammarJob) -> None:
        self.jobs[job.ticket] = job

    def drop(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            self.jobs.pop(ticket, None)
            self.prepared.pop(ticket, None)

    def take(self, ticket: int) -> GrammarJob:
        return self.prepared.pop(ticket)


class Harness:
    """The steps of the engine core without its loop.

    Results arrive in order, but as late as `rng` decides.
    """

    def __init__(
        self,
        limits: Limits,
        groups: tuple[KVGroup, ...] = FULL,
        rng: random.Random | None = None,
        *,
        late: bool = False,
    ) -> None:
        self.limits = limits
        self.groups = groups
        self.rng = rng or random.Random(0)
        self.connector = LateStore(limits, groups, self.rng) if late else None
        self.scheduler = Scheduler(
            limits, groups, eos_ids=(EOS,), vocab_size=VOCAB, connector=self.connector
        )
        self.now_s = 0.0
        self.grammars = self.scheduler.grammars = SlowGrammars()
        self.runner = FakeModelRunner(limits, groups)
        self.in_flight: deque[StepPlan] = deque()
        self.answers: dict[int, Answer] = {}
        self.plans: list[StepPlan] = []
        self.record: StepRecord | None = None
        self.num_preempted = 0
        self.num_resets = 0
        self.num_drafts = 0  # verified drafts
        self.num_right = 0

    @property
    def num_free(self) -> int:
        return self.scheduler.kv_manager.pool.num_free

    def submit(self, msg: Submit) -> Answer:
        self.scheduler.submit(msg, self.now_s)
        self.answers[msg.rid] = Answer(msg)
        return self.answers[msg.rid]

    def abort(self, *rids: int) -> None:
        self.take(self.scheduler.abort(rids))

    def prepare(self, *rids: int) -> None:
        """Finish the grammar jobs of these requests; of all without arguments."""
        for request in list(self.scheduler.preparing):
            ticket = request.grammar_ticket
            if ticket in self.grammars.jobs and (not rids or request.rid in rids):
                self.finish_grammar(ticket)

    def finish_grammar(self, ticket: int) -> None:
        job = self.grammars.jobs.pop(ticket)
        self.grammars.prepared[ticket] = job
        error = "it does not compile" if job.grammar == BAD_GRAMMAR else ""
        self.take(self.scheduler.grammar_prepared(ticket, error))

    def plan(self) -> StepPlan | None:
        self.now_s += 0.05
        plan = self.scheduler.plan(self.now_s)
        if plan is not None:
            self._check(plan)
            self.plans.append(plan)
            self.in_flight.append(plan)
            self.runner.start(plan)
            if self.rng.random() < 0.5:
                self.runner.catch_up()
        self.scheduler.audit()
        return plan

    def update_from_output(self) -> StepOutput:
        output = self.scheduler.update_from_output(self.in_flight.popleft(), self.runner.result())
        self.take(output)
        self.scheduler.audit()
        assert output.record is not None
        self.record = output.record
        self.num_preempted += output.record.num_preempted
        self.num_right += sum(output.record.num_accepted)
        return output

    def step(self) -> None:
        """Run one iteration of the core's loop."""
        if len(self.in_flight) < self.limits.depth and self.plan() is not None:
            return
        if self.in_flight:
            self.update_from_output()
        elif self.scheduler.can_run:
            raise AssertionError("requests wait and nothing will ever wake them")
        else:
            self.prepare()

    def run(self) -> None:
        while self.in_flight or self.scheduler.has_work:
            self.step()

    def take(self, output: StepOutput | None) -> None:
        if output is None:
            return
        rids = np.frombuffer(output.rids, "<i8").tolist()
        tokens = np.frombuffer(output.tokens, "<i4").tolist()
        for rid, token, finish in zip(rids, tokens, output.finish, strict=True):
            answer = self.answers[rid]
            assert not answer.finish, f"request {rid} goes on after its end"
            if token >= 0:
                answer.tokens.append(token)
            answer.finish = FinishReason.NAMES[finish]
            answer.stop_id = output.stop_ids.get(rid)
            answer.error = output.errors.get(rid, "")
            if rid in output.cached:
                assert answer.cached is None, "cache hits are told once"
                assert len(answer.tokens) == 1
                answer.cached = output.cached[rid]
            if rid in output.logprobs:
                answer.logprobs.append(output.logprobs[rid].pop(0))
        for rid, part in output.prompt_logprobs.items():
            for position, row in enumerate(part.rows, part.start):
                assert position not in self.answers[rid].prompt_scores, (
                    "a prompt position was scored twice"
                )
                self.answers[rid].prompt_scores[position] = row

    def check_answers(self) -> None:
        """Check that all answers are the oracle's and no resources are held."""
        for answer in self.answers.values():
            self._check_answer(answer)
        self.scheduler.audit()
        self._check_cache()
        for pool in self.scheduler.kv_manager.pools:
            assert pool.num_free == pool.num_blocks - 1
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.check_at_s == math.inf, "a fetch is still leased"
        assert not self.grammars.jobs
        assert not self.grammars.prepared, "grammars are kept for nobody"

    def _check_answer(self, answer: Answer) -> None:
        prompt = answer.prompt
        sampling = answer.msg.sampling
        if sampling.grammar == BAD_GRAMMAR and answer.finish != "abort":
            assert (answer.finish, answer.error) == ("error", "it does not compile")
            assert answer.tokens == []
            return
        emitted = len(prompt) - answer.msg.num_prompt
        if emitted:
            prompt = prompt[:-emitted]
        tokens, finish = oracle(self.groups, prompt, sampling, self.limits.max_model_len)
        tokens = tokens[emitted:]
        if prompt[0] == POISON and answer.finish != "abort":
            assert (answer.finish, answer.error, answer.tokens) == ("error", "poisoned", [])
            return
        if answer.finish == "abort":
            assert answer.tokens == tokens[: len(answer.tokens)]
            return
        assert (answer.tokens, answer.finish) == (tokens, finish), answer
        assert answer.cached is not None
        assert answer.stop_id == (tokens[-1] if finish == "stop" and tokens[-1] != EOS else None)
        known = states(self.groups, prompt + tokens)
        if sampling.logprobs is not None:
            first = len(answer.prompt) - 1
            assert answer.logprobs == [
                score(known[first + i], token) for i, token in enumerate(tokens)
            ]
        if sampling.prompt_logprobs is not None:
            assert answer.cached == 0
            scores = {p: score(known[p - 1], prompt[p]) for p in range(1, len(prompt))}
            assert answer.prompt_scores == scores

    def _check_cache(self) -> None:
        """Check that every cached block, in the pool and in the store, has its tokens' contents."""
        expected: dict[Key, U64] = {}
        size = self.limits.block_size
        for answer in self.answers.values():
            tokens = answer.prompt + answer.tokens
            _, blocks = layers(self.groups, tokens)
            for epoch in range(self.num_resets + 1):
                hashes = chain(
                    root_of(extras_of(answer.msg.salt), epoch), np.array(tokens, np.int32), size
                )
                for g, content in enumerate(blocks):
                    most = getattr(self.groups[g].rule, "entries", 10**6)
                    for i, h in enumerate(hashes):
                        if i * size < most:  # a block's last entries may be unused
                            expected[h, g] = content[i][: most - i * size]
        kv_manager = self.scheduler.kv_manager
        store: Any = kv_manager.connector
        for number, pool in enumerate(kv_manager.pools):
            for key, block in pool._by_key.items():
                found = self.runner.kv[key[1]][block]
                assert (expected[key] == found[: len(expected[key])]).all(), (key, block)
            for key, place in store.contents(number).items() if store else ():
                found = self.runner.host_blocks[key[1]][place]
                assert (expected[key] == found[: len(expected[key])]).all(), (key, place)

    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.num_resets += 1

    def start_over(self) -> None:
        """Break the group: steps in flight are lost."""
        tickets = [new.grammar_ticket for plan in self.in_flight for new in plan.new_requests]
        for ticket in tickets:  # as if the runner had never seen these plans
            if ticket and self.rng.random() < 0.5:
                self.grammars.prepared[ticket] = GrammarJob(ticket, GRAMMAR, [])
        self.scheduler.start_over()
        self.in_flight.clear()
        self.runner.start_over()

    def _check(self, plan: StepPlan) -> None:
        limits = self.limits
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.starts_R) == len(plan.counts_R) == len(plan.samples_R) == len(plan.slots_R)
        if plan.num_drafts_R is not None:
            assert not self.in_flight, "a plan with drafts was made beside another"
            assert ((plan.num_drafts_R >= 0) & (plan.num_drafts_R <= limits.num_drafts)).all()
            assert (plan.num_drafts_R < plan.counts_R).all()
            self.num_drafts += int(plan.num_drafts_R.sum())
        assert 0 < plan.counts_R.min() <= plan.counts_R.max() <= limits.prefill_chunk
        assert len(set(plan.slots_R.tolist())) == len(plan.slots_R) <= limits.max_num_seqs
        assert plan.step == len(self.plans)
        for new in plan.new_requests:
            if new.sampling.grammar is not None:
                job = self.grammars.take(new.grammar_ticket)
                assert job.grammar == new.sampling.grammar
                assert job.answer == new.tokens[new.num_prompt :].tolist()
        for diff in plan.diffs:
            assert diff.slots_N.dtype == diff.indices_N.dtype == diff.blocks_N.dtype == np.int32
        assert plan.slots_R.dtype == plan.starts_R.dtype == plan.counts_R.dtype == np.int32


def random_submit(rng: random.Random, rid: int, stems: list[list[int]], limits: Limits) -> Submit:
    """Make a random request: prompts often share a prefix, and every option occurs at times."""
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(0, len(stem))] + [
        rng.randrange(20, VOCAB) for _ in range(rng.randint(1, 6))
    ]
    if rng.random() < 0.05:
        prompt[0] = POISON
    max_tokens = min(rng.randint(1, 20), limits.max_model_len - len(prompt))
    return submit_of(
        rid,
        prompt,
        priority=rng.choice([0, 0, 0, 1, -1]),
        salt=rng.choice(["", "", "tenant"]),
        seed=rng.randrange(3),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 5]) if max_tokens >= 5 else 0,
        stop_ids=rng.choice([(EOS,), (EOS, 7, 30, 31), ()]),
        logprobs=rng.choice([None, None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
        grammar=rng.choice([None, None, None, None, GRAMMAR, GRAMMAR, BAD_GRAMMAR]),
    )


def random_traffic(
    harness: Harness, rng: random.Random, num_requests: int, *, resets: float = 0.01
) -> None:
    """Submit, abort and reset in random order until every request has ended.

    `resets` is the probability of each kind of reset per step.
    """
    stems = [[rng.randrange(20, VOCAB) for _ in range(rng.choice([9, 17, 30]))] for _ in range(3)]
    rid = 0
    while rid < num_requests or harness.scheduler.has_work or harness.in_flight:
        if rid < num_requests and rng.random() < 0.4:
            harness.submit(random_submit(rng, rid, stems, harness.limits))
            rid += 1
        if rng.random() < 0.008:
            open_rids = [r for r, a in harness.answers.items() if not a.finish]
            harness.abort(*rng.sample(open_rids, min(len(open_rids), 2)), 999_999)
        if harness.grammars.jobs and rng.random() < 0.3:
            harness.finish_grammar(rng.choice(list(harness.grammars.jobs)))
        if rng.random() < resets:
            harness.reset()
        if rng.random() < resets:
            harness.start_over()
        harness.step()
