"""A model of hashes that uses block tables exactly as a real model does, and a plain oracle for it.

Layer g belongs to KV group g. The KV entry of a position is a hash of the layer's input there. A
layer's output is a hash of all entries that its group lets the position see. So a token depends on
every entry ever read: if one block is wrong, is reused too early, or misses a copy, the tokens
differ from those of `oracle`, which has no blocks.

A recurrent layer's block has an entry per token, and the state at the start of each of its tiles: a
hash of the state before it and of the sum of the entries between them. An output is a hash of its
tile's starting state and of the sum of the tile's entries so far. Entries of the current step that
have no block must come from the same row.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.config import Limits
from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.plan import StepPlan, StepResult, TaskOutput
from moeserve.messages import Logprobs, PromptLogprobs
from moeserve.sampling import TokenSampling

VOCAB = 50
POISON = 13  # sampling fails for a prompt that begins with this token
U64 = NDArray[np.uint64]
_GARBAGE = np.uint64(0xDEAD)
ONE = np.uint64(1)


def mix(values: U64) -> U64:
    values = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x1234567)
    values = values ^ (values >> np.uint64(29))
    return values * np.uint64(0xBF58476D1CE4E5B9)


def positions(start: int, end: int) -> U64:
    return np.arange(start, end, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class First(KVRule):
    """Only the first `entries` positions have entries, and all later positions see them.

    So the cache stops growing, like that of an encoder.
    """

    entries: int = 6

    def length(self, position: Any) -> Any:
        return position - (position > self.entries) * (position - self.entries)


def end_seen(group: KVGroup, position: int) -> int:
    """Return how many entries this position can see, its own included."""
    return int(group.rule.length(position + 1))


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
    """Return the last layer's output at each position, computed from the tokens alone."""
    return layers(groups, tokens)[0]


def layers(groups: tuple[KVGroup, ...], tokens: list[int]) -> tuple[U64, list[U64]]:
    """Return the last layer's outputs, and the full blocks of every layer."""
    values = first_input(np.array(tokens, np.int32))
    blocks = []
    for group in groups:
        entries = kv_entry(values, positions(0, len(tokens)))
        full = len(tokens) // group.block_size
        size = group.block_size
        content = entries[: full * size].reshape(-1, size)
        if group.rule.tile is not None:
            tile = group.rule.tile
            borders = [np.zeros(1, np.uint64)]
            parts = []
            for at in range(0, len(tokens), tile):
                sums = np.cumsum(entries[at : at + tile])
                parts.append(mix(borders[-1] + sums))
                borders.append(mix(borders[-1] + sums[-1:] + ONE))
            values = np.concatenate(parts)
            borders_M = np.concatenate(borders)[: full * size // tile]
            blocks.append(np.concatenate((content, borders_M.reshape(full, size // tile)), 1))
            continue
        blocks.append(content)
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(entries)))
        first = np.array([first_seen(group, p) for p in range(len(tokens))])
        ends = np.array([end_seen(group, p) for p in range(len(tokens))])
        values = mix(sums[ends] - sums[first])
    return values, blocks


def oracle(
    groups: tuple[KVGroup, ...], prompt: list[int], sampling: TokenSampling, max_len: int
) -> tuple[list[int], str]:
    """Return the tokens that a request must produce, and its finish reason."""
    tokens = list(prompt)
    output = []
    while True:
        token = pick(states(groups, tokens)[-1], sampling.seed)
        tokens.append(token)
        output.append(token)
        if token in sampling.stop_ids and len(output) >= sampling.min_tokens:
            return output, "stop"
        if len(output) == sampling.max_tokens or len(tokens) == max_len:
            return output, "length"


class FakeModelRunner:
    """Executes plans in order, as late as told, and checks that they never conflict."""

    def __init__(self, limits: Limits, groups: tuple[KVGroup, ...]) -> None:
        self.groups = groups
        self.block_size = limits.block_size
        pools = (
            (limits.num_blocks, limits.num_store_blocks),
            (limits.num_states, limits.num_store_states),
        )
        widths = [
            group.block_size + group.block_size // (group.rule.tile or 2**31) for group in groups
        ]
        self.kv, self.host_blocks = (
            [
                np.full((pools[g.pool_index][i], w), _GARBAGE, np.uint64)
                for g, w in zip(groups, widths, strict=True)
            ]
            for i in range(2)
        )
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self.tables = np.full((len(groups), limits.max_num_seqs, max_blocks), -1, np.int32)
        self.tokens = np.full((limits.max_num_seqs, limits.max_model_len), -1, np.int32)
        self.sampling: dict[int, TokenSampling] = {}
        self.num_prompt: dict[int, int] = {}
        self.todo: deque[StepPlan] = deque()
        self.done: deque[StepResult] = deque()
        self.num_stored = self.num_loaded = 0
        self.tears = 0.0  # probability that a plan's loads bring wrong contents
        self.num_torn = 0
        self.num_drafts = limits.num_drafts
        self.drafts: dict[int, list[int]] = {}
        self.rng = random.Random(limits.num_drafts)

    def start(self, plan: StepPlan) -> None:
        self.todo.append(plan)

    def catch_up(self) -> None:
        while self.todo:
            self.done.append(self.execute(self.todo.popleft()))

    def spoil(self, slot: int, where: NDArray[np.int64]) -> None:
        """Overwrite what a step writes at these positions."""
        for g, group in enumerate(self.groups):
            blocks = self.tables[g, slot, where // self.block_size]
            places = where % self.block_size
            self.kv[g][blocks, places] = 666
            if group.rule.tile is not None:
                begins = where % group.rule.tile == 0
                self.kv[g][blocks[begins], self.block_size + places[begins] // group.rule.tile] = (
                    666
                )

    def start_over(self) -> None:
        """Drop the plans whose results nobody awaits any more; some may have been executed."""
        self.todo.clear()
        self.done.clear()

    def result(self) -> StepResult:
        if not self.done:
            self.done.append(self.execute(self.todo.popleft()))
        return self.done.popleft()

    def execute(self, plan: StepPlan) -> StepResult:
        is_torn = self._apply(plan)
        rows = list(
            zip(plan.slots_R.tolist(), plan.starts_R.tolist(), plan.counts_R.tolist(), strict=True)
        )
        values = []
        for slot, start, count in rows:
            tokens = self.tokens[slot, start : start + count]
            assert (tokens >= 0).all(), (
                f"slot {slot} reads tokens {start}..{start + count} before they exist"
            )
            values.append(first_input(tokens))
        for g, group in enumerate(self.groups):
            self._check_writes(g, rows)
            if group.rule.tile is not None:
                before = self.kv[g].copy()  # because rows run in parallel
                values = [
                    self._recur(g, group.rule.tile, before, *row, value)
                    for row, value in zip(rows, values, strict=True)
                ]
                continue
            self._write(g, rows, values)
            values = [self._attend(g, group, *row) for row in rows]
        return replace(self._sample(plan, rows, values), kv_lost=is_torn)

    def _apply(self, plan: StepPlan) -> bool:
        """Apply a plan's tables and copies; return whether its loads were torn."""
        is_torn = bool(plan.loads) and self.rng.random() < self.tears
        self.num_torn += is_torn
        for g, group in enumerate(self.groups):
            for move in plan.stores:
                if move.pool_index == group.pool_index:
                    self.host_blocks[g][move.connector_entry] = self.kv[g][move.block]
            for move in plan.loads:
                if move.pool_index == group.pool_index:
                    found = self.host_blocks[g][move.connector_entry]
                    self.kv[g][move.block] = found ^ _GARBAGE if is_torn else found
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
        if plan.num_drafts_R is not None:
            ends_R = plan.starts_R + plan.counts_R
            for slot, end, k in zip(
                plan.slots_R.tolist(), ends_R.tolist(), plan.num_drafts_R.tolist(), strict=True
            ):
                self.tokens[slot, end - k : end] = self.drafts[slot][:k] if k else []
        return is_torn

    def _check_writes(self, g: int, rows: list[tuple[int, int, int]]) -> None:
        written: set[tuple[int, int]] = set()
        for slot, start, count in rows:
            where = np.arange(start, self._end(g, start + count))
            blocks = self.tables[g, slot, where // self.block_size]
            assert (blocks >= 0).all(), f"slot {slot} has no table entry"
            places = {
                place
                for place in zip(blocks.tolist(), (where % self.block_size).tolist(), strict=True)
                if place[0]
            }
            assert not places & written, "two rows write one KV entry in the same step"
            written |= places

    def _write(self, g: int, rows: list[tuple[int, int, int]], values: list[U64]) -> None:
        for (slot, start, count), value in zip(rows, values, strict=True):
            where = np.arange(start, max(start, self._end(g, start + count)))
            blocks = self.tables[g, slot, where // self.block_size]
            assert (blocks > 0).all(), f"slot {slot} writes K/V to no block"
            entries = kv_entry(value[: len(where)], where.astype(np.uint64))
            self.kv[g][blocks, where % self.block_size] = entries

    def _end(self, g: int, end: int) -> int:
        return int(self.groups[g].rule.length(end))

    def _recur(
        self, g: int, tile: int, before: U64, slot: int, start: int, count: int, value: U64
    ) -> U64:
        """Compute a recurrent layer; `before` is the cache at the start of the step."""
        kv = self.kv[g]
        size = self.block_size
        end = start + count
        entries = kv_entry(value, positions(start, end))
        out = []
        # State and entries of the previous tile.
        border = np.zeros(1, np.uint64)
        rows = np.zeros(0, np.uint64)
        for at in range(start // tile * tile, end, tile):
            first = max(at, start)
            last = min(at + tile, end)
            block = int(self.tables[g, slot, at // size])
            place = at % size
            if first > at:
                assert block > 0, f"slot {slot} goes on with a tile that is nowhere"
                border = before[block, size + place // tile, None]
                rows = before[block, place : place + first - at]
            else:
                if first == start and at:
                    other = int(self.tables[g, slot, (at - 1) // size])
                    there = (at - tile) % size
                    assert other > 0, f"slot {slot} begins behind a tile that is nowhere"
                    border = before[other, size + there // tile, None]
                    rows = before[other, there : there + tile]
                border = mix(border + rows.sum(dtype=np.uint64) + ONE) if at else border
                rows = np.zeros(0, np.uint64)
                if block:
                    kv[block, size + place // tile] = border[0]
            new = entries[first - start : last - start]
            if block:
                kv[block, first % size : first % size + len(new)] = new
            rows = np.concatenate((rows, new))
            out.append(mix(border + np.cumsum(rows)[first - at :]))
        return np.concatenate(out)

    def _attend(self, g: int, group: KVGroup, slot: int, start: int, count: int) -> U64:
        first = first_seen(group, start)
        where = np.arange(first, self._end(g, start + count))
        blocks = self.tables[g, slot, where // self.block_size]
        assert (blocks > 0).all(), f"slot {slot} reads K/V from no block"
        entries = self.kv[g][blocks, where % self.block_size]
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(entries)))
        ends = np.arange(start, start + count)
        firsts = np.array([first_seen(group, p) for p in ends])
        lasts = np.array([end_seen(group, p) for p in ends])
        return mix(sums[lasts - first] - sums[firsts - first])

    def _sample(
        self, plan: StepPlan, rows: list[tuple[int, int, int]], values: list[U64]
    ) -> StepResult:
        result = StepResult(plan.step, np.zeros(0, np.int32))
        drafts_R = np.zeros(len(rows), np.int32) if plan.num_drafts_R is None else plan.num_drafts_R
        kept_S: list[list[int]] = []
        num_drafts_S: list[int] = []
        for (slot, start, count), value, samples, k in zip(
            rows, values, plan.samples_R, drafts_R.tolist(), strict=True
        ):
            sampling = self.sampling[slot]
            end = start + count
            if sampling.prompt_logprobs is not None and start + 1 < self.num_prompt[slot]:
                scored = range(start + 1, min(end + 1, self.num_prompt[slot]))
                scores = [score(value[p - 1 - start], int(self.tokens[slot, p])) for p in scored]
                result.outputs.setdefault(slot, TaskOutput()).prompt_logprobs = PromptLogprobs(
                    start + 1, scores
                )
            if not samples:
                continue
            kept: list[int] = []
            for at in range(end - k, end + 1):  # the positions of the new tokens
                kept.append(pick(value[at - 1 - start], sampling.seed))
                if sampling.logprobs is not None:
                    result.outputs.setdefault(slot, TaskOutput()).logprobs.append(
                        score(value[at - 1 - start], kept[-1])
                    )
                if at < end and kept[-1] != self.tokens[slot, at]:
                    break
            if self.tokens[slot, 0] == POISON:
                result.failed[slot] = "poisoned"
                if slot in result.outputs:
                    result.outputs[slot].logprobs.clear()
                kept = [-1]
            known = end - k + len(kept)
            self.tokens[slot, end - k : known] = np.maximum(kept, 0)
            kept_S.append(kept)
            num_drafts_S.append(self._guess(slot, known))
        return replace(
            result,
            tokens_N=np.array([token for kept in kept_S for token in kept], np.int32),
            counts_S=None
            if plan.num_drafts_R is None
            else np.array([len(kept) for kept in kept_S], np.int32),
            num_drafts_S=np.array(num_drafts_S, np.int32) if self.num_drafts else None,
        )

    def _guess(self, slot: int, known: int) -> int:
        """Draft tokens after the known ones, most of them right; return how many."""
        number = self.rng.choice((0, self.num_drafts, self.rng.randint(0, self.num_drafts)))
        tokens = self.tokens[slot, :known].tolist()
        for _ in range(number):
            right = pick(states(self.groups, tokens)[-1], self.sampling[slot].seed)
            tokens.append(right if self.rng.random() < 0.8 else self.rng.randrange(VOCAB))
        self.drafts[slot] = tokens[known:]
        return number
