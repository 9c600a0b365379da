"""The pieces of text and tokens that a caller receives while a request runs."""

from __future__ import annotations

import msgspec

from moeserve.messages import Logprobs


class Delta(msgspec.Struct, gc=False):
    """New text and tokens of one sequence of a request, `index` in 0..n-1.

    text: new text without stop strings; empty while a character or a possible stop string is incomplete. logprobs:
    aligned with token_ids, empty if not asked for. finish_reason: "stop", "length" or "abort" in the sequence's last
    delta; stop_reason: the stop string or stop token that ended it. prompt_logprobs: in the first delta of sequence 0;
    entry i belongs to prompt token i, entry 0 is None.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[Logprobs] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None  # set once per sequence, with its first delta
    prompt_logprobs: list[Logprobs | None] | None = None
