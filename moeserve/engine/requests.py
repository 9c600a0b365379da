"""A request as the scheduler knows it, and the queue of those that wait for a slot."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from moeserve.engine.plan import I32
from moeserve.errors import ContextLengthExceeded, InvalidRequest
from moeserve.messages import Submit
from moeserve.sampling import TokenSampling


@dataclass(slots=True, eq=False)
class Request:
    """What stays with a request for its whole life, in a slot or not. Progress lives in `Columns` while it runs.

    tokens: everything known at the last admission or preemption: prompt, then what was emitted.
    max_total: length at which it ends, prompt included; the token at max_total - 1 is never computed upon.
    """

    rid: int
    tokens: I32
    num_prompt: int
    max_total: int
    sampling: TokenSampling
    priority: int
    salt: str
    arrival: int
    num_resets: int = -1  # of the prefix cache, when the hash chain began
    root: bytes = b""  # what the chain starts from
    hashes: list[bytes] = field(default_factory=list)  # chain over full blocks, as far as it was needed
    num_cached: int | None = None  # prompt tokens found in the cache at the first admission
    was_sent: bool = False  # its first token went out, and num_cached with it
    num_scored: int = 1  # prompt positions whose logprobs were sent (position 0 has none)

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first."""
        return self.priority, self.arrival

    @property
    def reads_cache(self) -> bool:
        """Prompt logprobs need every position computed."""
        return self.sampling.prompt_logprobs is None


def request_of(msg: Submit, arrival: int, max_model_len: int, vocab_size: int) -> Request:
    """Checks a Submit; raises InvalidRequest with the values when it cannot be served."""
    if len(msg.tokens) % 4:
        raise InvalidRequest(f"tokens has {len(msg.tokens)} bytes, not a whole number of int32", param="prompt")
    tokens = np.frombuffer(msg.tokens, "<i4")
    if not 1 <= msg.num_prompt <= len(tokens):
        raise InvalidRequest(f"num_prompt is {msg.num_prompt} of {len(tokens)} tokens", param="prompt")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise InvalidRequest(
            f"token ids must lie in 0..{vocab_size - 1}; found {tokens.min()}..{tokens.max()}", param="prompt"
        )
    stops = msg.sampling.stop_ids
    if stops and not 0 <= min(stops) <= max(stops) < vocab_size:
        raise InvalidRequest(
            f"stop ids must lie in 0..{vocab_size - 1}; found {min(stops)}..{max(stops)}", param="stop_token_ids"
        )
    if len(tokens) >= max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(tokens)} tokens; the context of {max_model_len} must also hold an answer",
            param="prompt",
        )
    if msg.sampling.max_tokens <= len(tokens) - msg.num_prompt:
        raise InvalidRequest(
            f"max_tokens is {msg.sampling.max_tokens} and {len(tokens) - msg.num_prompt} were emitted already",
            param="max_tokens",
        )
    return Request(
        rid=msg.rid,
        tokens=tokens,
        num_prompt=msg.num_prompt,
        max_total=min(msg.num_prompt + msg.sampling.max_tokens, max_model_len),
        sampling=msg.sampling,
        priority=msg.priority,
        salt=msg.salt,
        arrival=arrival,
    )


class WaitingQueue:
    """Waiting requests, best rank first; any of them can leave."""

    def __init__(self) -> None:
        self._queue: list[Request] = []
        self._by_rid: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, rid: int) -> bool:
        return rid in self._by_rid

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    @property
    def head(self) -> Request | None:
        return self._queue[0] if self._queue else None

    def push(self, request: Request) -> None:
        insort(self._queue, request, key=lambda r: r.rank)
        self._by_rid[request.rid] = request

    def pop(self) -> Request:
        """Takes the head out."""
        request = self._queue.pop(0)
        del self._by_rid[request.rid]
        return request

    def remove(self, rid: int) -> Request:
        request = self._by_rid.pop(rid)
        del self._queue[bisect_left(self._queue, request.rank, key=lambda r: r.rank)]
        return request
