"""Computes the answer of a receipt again, and says in which respect it is another one, if it is."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

from msgspec.structs import replace

from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta
from moeserve.receipts import LINK_TOKENS, MARK_BYTES, Receipt, marks_of, next_link


class Computed(NamedTuple):
    """A sequence as this engine computes it. digests: of each token's logits."""

    token_ids: list[int]
    digests: list[bytes]
    finish_reason: str | None
    stop_reason: int | str | None


async def compute_again(front: FrontEnd, receipt: Receipt) -> Computed:
    """Returns this engine's answer, up to the first token that is not the receipt's. Raises RequestError where the
    engine takes no such request."""
    wanted, params = receipt.token_ids, receipt.sampling
    params = replace(
        params,
        n=1,
        seed=int(receipt.seed),
        max_tokens=len(wanted),
        min_tokens=min(params.min_tokens, len(wanted)),
        receipt=True,
    )
    found, ends = [], Delta(0)
    async with await front.generate(receipt.prompt_token_ids, params, marked=receipt.marked) as generation:
        async for ends in generation:
            found += ends.token_ids
            if found != wanted[: len(found)]:
                break
        digests = generation.sequences[0].digests[: len(found)]
    return Computed(found, digests, ends.finish_reason, ends.stop_reason)


def difference(receipt: Receipt, found: Computed) -> str:
    """Returns the first respect in which the computed answer is not the receipt's; empty if there is none."""
    marks = marks_of(receipt) if receipt.links else []
    for i, (said, computed) in enumerate(zip_longest(receipt.token_ids, found.token_ids)):
        if computed is None:
            return f"token {i} is {said} in the receipt; the computed answer ends before it"
        moved = bool(marks) and marks[i] != found.digests[i][:MARK_BYTES]
        if said != computed:
            logits = " from other logits" * moved
            return f"token {i} is {said} in the receipt, {computed} computed{logits}"
        if moved and _holds(receipt, found, 1 + i // LINK_TOKENS):
            return f"token {i} and its logits are equal; its mark was changed"
        if moved:
            return f"token {i} is {said} in both, but sampled from other logits"
    for number in range(1, len(receipt.links)):
        if not _holds(receipt, found, number):
            first = (number - 1) * LINK_TOKENS
            last = min(first + LINK_TOKENS, len(found.token_ids)) - 1
            return f"link {number} is not of tokens {first} to {last}, though they and their marks are equal"
    ends = receipt.finish_reason, receipt.stop_reason
    if ends != (now := (found.finish_reason, found.stop_reason)):
        last = len(found.token_ids) - 1
        return f"token {last} ends the answer by {_end(*ends)} in the receipt, by {_end(*now)} computed"
    return ""


def _holds(receipt: Receipt, found: Computed, number: int) -> bool:
    """Whether a link follows from the one before and what was computed."""
    start = (number - 1) * LINK_TOKENS
    return receipt.links[number] == next_link(receipt.links[number - 1], found.token_ids, found.digests, start)


def _end(finish_reason: str | None, stop_reason: int | str | None) -> str:
    return f"{finish_reason}" if stop_reason is None else f"{finish_reason} at {stop_reason!r}"
