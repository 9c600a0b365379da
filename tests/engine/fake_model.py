"""A model of hashes that reads and writes K/V through block tables exactly as a real one, and its plain oracle.

Layer g belongs to KV group g. The KV entry of a position is a hash of the layer's input there; a layer's output is a
hash of all entries that its group lets the position see. So a token depends on every entry ever read: one wrong block,
one block reused too early, one missing copy, and the tokens differ from `oracle`, which knows no blocks at all.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from moeserve.config import Limits
from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import StepPlan, StepResult
from moeserve.messages import Logprobs, PromptLogprobs
from moeserve.sampling import TokenSampling

VOCAB = 50
POISON = 13  # a prompt that begins with this token fails in sampling
U64 = NDArray[np.uint64]
_GARBAGE = np.uint64(0xDEAD)


def mix(values: U64) -> U64:
    values = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x1234567)
    values = values ^ (values >> np.uint64(29))
    return values * np.uint64(0xBF58476D1CE4E5B9)


def positions(start: int, end: int) -> U64:
    return np.arange(start, end, dtype=np.uint64)


def first_seen(group: KVGroup, position: int) -> int:
    return 0 if group.rule.window is None else max(0, position - group.rule.window + 1)


def first_input(tokens: NDArray[np.int32]) -> U64:
    return mix(tokens.astype(np.uint64) + np.uint64(7))


def kv_entry(inputs: U64, where: U64) -> U64:
    return mix(inputs + where * np.uint64(0x5851F42D4C957F2D))


def pick(state: np.uint64, seed: int) -> int:
    return int(mix(np.array([state], np.uint64) + np.uint64(seed))[0] % np.uint64(VOCAB))


def score(state: np.uint64, token: int) -> Logprobs:
    return Logprobs([token], [-float(int(state) % 1000)], 1)


def states(groups: tuple[KVGroup, ...], tokens: list[int]) -> U64:
    """The last layer's output at each position, computed from the tokens alone."""
    return layers(groups, tokens)[0]


def layers(groups: tuple[KVGroup, ...], tokens: list[int]) -> tuple[U64, list[U64]]:
    """The last layer's outputs, and the KV entries of every layer."""
    values, kv = first_input(np.array(tokens, np.int32)), []
    for group in groups:
        kv.append(kv_entry(values, positions(0, len(tokens))))
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(kv[-1])))
        first = np.array([first_seen(group, p) for p in range(len(tokens))])
        values = mix(sums[1:] - sums[first])
    return values, kv


def oracle(
    groups: tuple[KVGroup, ...], prompt: list[int], sampling: TokenSampling, max_len: int
) -> tuple[list[int], str]:
    """What a request must produce, one token after the other, and how it ends."""
    tokens, output = list(prompt), []
    while True:
        token = pick(states(groups, tokens)[-1], sampling.seed)
        tokens.append(token)
        output.append(token)
        if token in sampling.stop_ids and len(output) >= sampling.min_tokens:
            return output, "stop"
        if len(output) == sampling.max_tokens or len(tokens) == max_len:
            return output, "length"


class FakeModelRunner:
    """Executes plans in order but as late as it is told to; checks that they never clash."""

    def __init__(self, limits: Limits, groups: tuple[KVGroup, ...]) -> None:
        self.groups = groups
        self.block_size = limits.block_size
        shape = (len(groups), limits.num_blocks, limits.block_size)
        self.kv = np.full(shape, _GARBAGE, np.uint64)
        self.host_blocks = np.full((len(groups), limits.num_store_blocks, limits.block_size), _GARBAGE, np.uint64)
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self.tables = np.full((len(groups), limits.max_num_seqs, max_blocks), -1, np.int32)
        self.tokens = np.full((limits.max_num_seqs, limits.max_model_len), -1, np.int32)
        self.sampling: dict[int, TokenSampling] = {}
        self.num_prompt: dict[int, int] = {}
        self.todo: deque[StepPlan] = deque()
        self.done: deque[StepResult] = deque()
        self.num_stored = self.num_loaded = 0

    def start(self, plan: StepPlan) -> None:
        self.todo.append(plan)

    def catch_up(self) -> None:
        while self.todo:
            self.done.append(self.execute(self.todo.popleft()))

    def result(self) -> StepResult:
        if not self.done:
            self.done.append(self.execute(self.todo.popleft()))
        return self.done.popleft()

    def execute(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        rows = list(zip(plan.slots_R.tolist(), plan.starts_R.tolist(), plan.counts_R.tolist(), strict=True))
        values = []
        for slot, start, count in rows:
            tokens = self.tokens[slot, start : start + count]
            assert (tokens >= 0).all(), f"slot {slot} reads tokens {start}..{start + count} before they exist"
            values.append(first_input(tokens))
        for g, group in enumerate(self.groups):
            self._write(g, rows, values)
            values = [self._attend(g, group, *row) for row in rows]
        return self._sample(plan, rows, values)

    def _apply(self, plan: StepPlan) -> None:
        for move in plan.stores:
            self.host_blocks[:, move.host_block] = self.kv[:, move.block]
        for move in plan.loads:
            self.kv[:, move.block] = self.host_blocks[:, move.host_block]
        self.num_stored += len(plan.stores)
        self.num_loaded += len(plan.loads)
        for request in plan.new_requests:
            self.tokens[request.slot] = -1
            self.tables[:, request.slot] = -1
            self.tokens[request.slot, : len(request.tokens)] = request.tokens
            self.sampling[request.slot] = request.sampling
            self.num_prompt[request.slot] = request.num_prompt
        for g, diff in enumerate(plan.diffs):
            where = list(zip(diff.slots_N.tolist(), diff.indices_N.tolist(), strict=True))
            assert len(set(where)) == len(where), "one table entry is written twice in a step"
            self.tables[g, diff.slots_N, diff.indices_N] = diff.blocks_N

    def _write(self, g: int, rows: list[tuple[int, int, int]], values: list[U64]) -> None:
        written: set[tuple[int, int]] = set()
        for (slot, start, count), value in zip(rows, values, strict=True):
            where = np.arange(start, start + count)
            blocks = self.tables[g, slot, where // self.block_size]
            assert (blocks > 0).all(), f"slot {slot} writes K/V to no block"
            places = set(zip(blocks.tolist(), (where % self.block_size).tolist(), strict=True))
            assert not places & written, "two rows write one KV entry in the same step"
            written |= places
            self.kv[g, blocks, where % self.block_size] = kv_entry(value, where.astype(np.uint64))

    def _attend(self, g: int, group: KVGroup, slot: int, start: int, count: int) -> U64:
        first = first_seen(group, start)
        where = np.arange(first, start + count)
        blocks = self.tables[g, slot, where // self.block_size]
        assert (blocks > 0).all(), f"slot {slot} reads K/V from no block"
        entries = self.kv[g, blocks, where % self.block_size]
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(entries)))
        ends = np.arange(start, start + count)
        firsts = np.array([first_seen(group, p) for p in ends])
        return mix(sums[ends + 1 - first] - sums[firsts - first])

    def _sample(self, plan: StepPlan, rows: list[tuple[int, int, int]], values: list[U64]) -> StepResult:
        result = StepResult(plan.step, np.zeros(int(plan.samples_R.sum()), np.int32))
        s = 0
        for (slot, start, count), value, samples in zip(rows, values, plan.samples_R.tolist(), strict=True):
            sampling, end = self.sampling[slot], start + count
            if sampling.prompt_logprobs is not None and start + 1 < self.num_prompt[slot]:
                scored = range(start + 1, min(end + 1, self.num_prompt[slot]))
                scores = [score(value[p - 1 - start], int(self.tokens[slot, p])) for p in scored]
                result.prompt_logprobs[slot] = PromptLogprobs(start + 1, scores)
            if not samples:
                continue
            token = pick(value[-1], sampling.seed)
            if self.tokens[slot, 0] == POISON:
                result.failed[slot] = "poisoned"
                token = -1
            elif sampling.logprobs is not None:
                result.logprobs[slot] = score(value[-1], token)
            self.tokens[slot, end] = max(token, 0)
            result.tokens_S[s] = token
            s += 1
        return result
