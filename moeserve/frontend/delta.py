"""What a caller receives while a request runs: pieces of text with the tokens behind them."""

from __future__ import annotations

import msgspec

from moeserve.messages import Logprobs


class Delta(msgspec.Struct, gc=False):
    """News of one sequence of a request: `index` in 0..n-1.

    text is new text, with stop strings already cut; it may be empty while a character or a possible stop string is
    incomplete. logprobs are aligned with token_ids (empty if not asked for). A sequence ends with the delta whose
    finish_reason is set: "stop", "length", "abort"; stop_reason is the stop string or the stop token that ended it.
    prompt_logprobs comes once, with the first delta of sequence 0: entry i belongs to prompt token i, entry 0 is None.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[Logprobs] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None  # set once per sequence, with its first delta
    prompt_logprobs: list[Logprobs | None] | None = None
