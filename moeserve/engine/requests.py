"""The scheduler's record of a request, and the queue of requests that wait for a slot."""

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
    """A request's facts, in a slot or not. Its progress lives in `InputBatch` while it runs.

    tokens: those known at the last admission or preemption: the prompt, then generated ones. max_total: length at
    which the request ends, prompt included; no step follows the token at max_total - 1.
    """

    rid: int
    tokens: I32
    num_prompt: int
    max_total: int
    sampling: TokenSampling
    priority: int
    salt: str
    arrival: int
    num_resets: int = -1  # resets of the prefix cache before the hash chain began
    root: bytes = b""  # start of the chain
    hashes: list[bytes] = field(default_factory=list)  # chain over full blocks, as far as needed
    num_cached: int | None = None  # prompt tokens found in the cache at the first admission
    was_sent: bool = False  # its first token was sent, and num_cached with it
    num_scored: int = 1  # prompt positions whose logprobs were sent (position 0 has none)

    @property
    def order(self) -> tuple[int, int]:
        """Place in line: priority, then arrival. Smaller values go first."""
        return self.priority, self.arrival

    @property
    def reads_cache(self) -> bool:
        """Whether cached blocks may be used. Prompt logprobs need every position computed."""
        return self.sampling.prompt_logprobs is None


def request_of(msg: Submit, arrival: int, max_model_len: int, vocab_size: int) -> Request:
    """Makes a Request of a checked Submit. Raises InvalidRequest with the values if it cannot be served."""
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
    """Waiting requests by priority, then arrival. Any of them can be removed."""

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
        """The next request to admit."""
        return self._queue[0] if self._queue else None

    def push(self, request: Request) -> None:
        """Adds a request at its place in line."""
        insort(self._queue, request, key=lambda r: r.order)
        self._by_rid[request.rid] = request

    def pop(self) -> Request:
        """Removes and returns the head."""
        request = self._queue.pop(0)
        del self._by_rid[request.rid]
        return request

    def remove(self, rid: int) -> Request:
        """Removes and returns a request by its id."""
        request = self._by_rid.pop(rid)
        del self._queue[bisect_left(self._queue, request.order, key=lambda r: r.order)]
        return request
