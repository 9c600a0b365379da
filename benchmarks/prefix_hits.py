"""Prefix cache hits of models with recurrent layers in a trace of conversations.

    python -m benchmarks.prefix_hits

Conversations start with one of a few system prompts, take several turns, and branch: an answer is
requested again, or a message is replaced. A null runner makes up the answers, so that only the
scheduler's choices are measured.

Target: within 1 % of full attention alone, with 16 times the state blocks that running requests
need.

Prints and saves the share of prompt tokens found in the cache: with full attention alone, and for
each number of state blocks (`states`, a multiple of what running requests need at once).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.common import parser, save
from moeserve.config import Limits
from moeserve.engine.blocks import STATES_HELD, KVGroup, groups_of
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.null_runner import NullRunner
from moeserve.engine.scheduler import Scheduler
from moeserve.messages import Submit
from moeserve.ops.rules import TILE
from moeserve.sampling import TokenSampling

VOCAB = 1000
BLOCK = 16
SLOTS = 16
MAX_LEN = 8192
BLOCKS = 16_000
SYSTEM_PROMPTS = 4
TURNS = 6
MULTIPLES = [1, 2, 4, 8, 16, 32, 64]
FULL = groups_of([KVRule()], BLOCK)
WITH_STATES = groups_of([KVRule(), KVRule(tile=TILE)], BLOCK)


@dataclass
class Conversation:
    """A conversation so far."""

    tokens: list[int]  # includes the newest answer
    turns_left: int = TURNS
    asked: list[int] = field(default_factory=list)  # the newest prompt


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--conversations", type=int, default=150)
    flags.add_argument("--multiples", type=int, nargs="+", default=MULTIPLES)
    args = flags.parse_args()
    save("prefix-hits", args, measure(args.conversations, args.multiples))


def measure(conversations: int, multiples: list[int]) -> dict[str, Any]:
    """Return the shares of prompt tokens that were found."""
    alone = asyncio.run(share_found(FULL, 0, conversations))
    rows = []
    for multiple in multiples:
        found = asyncio.run(
            share_found(WITH_STATES, multiple * STATES_HELD * SLOTS + 1, conversations)
        )
        rows.append(
            {"states": multiple, "found": round(found, 4), "of_full": round(found / alone, 4)}
        )
    return {
        "conversations": conversations,
        "full_attention": round(alone, 4),
        "beside_states": rows,
    }


async def share_found(groups: tuple[KVGroup, ...], num_states: int, count: int) -> float:
    """Play the trace; return the share of prompt tokens found in the prefix cache."""
    limits = Limits(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=2048,
        prefill_chunk=2048,
        max_model_len=MAX_LEN,
        block_size=BLOCK,
        num_blocks=BLOCKS,
        num_states=num_states,
    )
    scheduler = Scheduler(limits, groups, vocab_size=VOCAB)
    runner = NullRunner(VOCAB)
    rng = random.Random(0)
    stems = [words(rng, rng.randint(400, 2000)) for _ in range(SYSTEM_PROMPTS)]
    idle = [
        Conversation(rng.choice(stems) + words(rng, rng.randint(20, 300))) for _ in range(count)
    ]
    waiting: dict[int, Conversation] = {}
    rid = prompt_tokens = cached_tokens = 0
    while idle or waiting:
        # Most turns follow soon after the previous answer, so only the first few are candidates.
        while idle and len(waiting) < SLOTS + 4:
            talk = idle.pop(rng.randrange(min(len(idle), 2 * SLOTS)))
            talk.asked = talk.tokens.copy()
            scheduler.submit(submit_of(rid, talk.tokens, rng.randint(30, 250)))
            waiting[rid] = talk
            rid += 1
        plan = scheduler.plan()
        assert plan is not None
        output = scheduler.update_from_output(plan, await runner.start(plan).result())
        assert output.record is not None
        prompt_tokens += output.record.prompt_tokens
        cached_tokens += output.record.cached_tokens
        rids = np.frombuffer(output.rids, "<i8").tolist()
        tokens = np.frombuffer(output.tokens, "<i4").tolist()
        for done, token, finish in zip(rids, tokens, output.finish, strict=True):
            waiting[done].tokens.append(token)
            if finish:
                go_on(rng, waiting.pop(done), idle)
    return cached_tokens / prompt_tokens


def go_on(rng: random.Random, talk: Conversation, idle: list[Conversation]) -> None:
    """Give a conversation its next turn, if any is left: mostly a message after the answer."""
    talk.turns_left -= 1
    if not talk.turns_left:
        return
    if rng.random() < 0.2:
        talk.tokens = talk.asked.copy()  # request another answer
        if rng.random() < 0.5:
            # ... to another message
            talk.tokens[-rng.randint(1, 20) :] = words(rng, rng.randint(20, 200))
    else:
        talk.tokens += words(rng, rng.randint(20, 300))
    idle.insert(rng.randint(0, min(len(idle), 2 * SLOTS)), talk)


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def submit_of(rid: int, tokens: list[int], max_tokens: int) -> Submit:
    sampling = TokenSampling(seed=rid, max_tokens=max_tokens)
    return Submit(
        rid=rid, tokens=np.array(tokens, "<i4").tobytes(), num_prompt=len(tokens), sampling=sampling
    )


if __name__ == "__main__":
    main()
