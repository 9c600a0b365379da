"""Tokens over HTTP: /tokenize and /detokenize on both paths, and what clients learn of the
tokenizer.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import CONTEXT, TEMPLATE


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_and_tokens_both_ways(live: Any, prefix: str) -> None:
    _, there, _ = await live.post(
        f"{prefix}/tokenize", {"prompt": "Once <|im_end|>", "add_special_tokens": False}
    )
    assert there["count"] == len(there["tokens"])
    assert there["tokens"][-1] == live.engine.end
    _, back, _ = await live.post(f"{prefix}/detokenize", {"tokens": there["tokens"]})
    assert back["prompt"] == "Once <|im_end|>"


async def test_tokenizer_info_has_what_remote_tokenizers_read(live: Any) -> None:
    status, info = await live.get("/tokenizer_info")
    assert status == 200
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None  # there, and null: clients tell "none" from "unknown"
    assert info["chat_template"] == TEMPLATE
    assert info["model_max_length"] == CONTEXT
    live.front.tokenizer.special_tokens.pop("eos_token")
    try:
        assert (await live.get("/tokenizer_info"))[1][
            "eos_token"
        ] == "<|im_end|>"  # the model's own end token
    finally:
        live.front.tokenizer.special_tokens["eos_token"] = "<|im_end|>"
    live.front.tokenizer = None
    status, refused = await live.get("/tokenizer_info")
    assert (status, refused["error"]["message"]) == (400, "this server runs without a tokenizer")


async def test_ping_is_a_probe(live: Any) -> None:
    assert (await live.get("/ping"))[0] == 200
