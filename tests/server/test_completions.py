"""Completions: the four forms of a prompt, echo, logprobs columns, streams of several prompts."""

from __future__ import annotations

import pytest

PATH = "/v1/completions"


async def test_a_text_prompt_gets_sixteen_tokens_by_default(live, tokenizer):
    status, body, _ = await live.post(PATH, {"prompt": "Once"})
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["text"] == tokenizer.decode(live.engine.script[:16])


async def test_null_max_tokens_is_the_default(live):
    _, body, _ = await live.post(PATH, {"prompt": "Once", "max_tokens": None})
    assert body["usage"]["completion_tokens"] == 16


async def test_forms_of_a_prompt(live, tokenizer):
    ids = tokenizer.encode("Once upon")
    for prompt, count in ((ids, 1), ([ids, ids[:1]], 2), (["Once", "a fox", "x"], 3)):
        _, body, _ = await live.post(PATH, {"prompt": prompt, "n": 2, "max_tokens": 3})
        assert [c["index"] for c in body["choices"]] == list(range(2 * count))
    assert body["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(p)) for p in prompt)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * count


async def test_streamed_prompts_do_not_mix(live, tokenizer):
    asked = {
        "prompt": ["Once", "a fox"],
        "n": 2,
        "max_tokens": 20,
        "stream_options": {"include_usage": True},
    }
    _, whole, _ = await live.post(PATH, {k: v for k, v in asked.items() if k != "stream_options"})
    events = await live.events(PATH, asked)
    texts = [""] * 4
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [c["text"] for c in whole["choices"]]
    assert events[-1]["usage"] == whole["usage"]


async def test_echo(live, tokenizer):
    _, body, _ = await live.post(PATH, {"prompt": "a fox", "echo": True, "max_tokens": 2})
    assert body["choices"][0]["text"] == "a fox" + tokenizer.decode(live.engine.script[:2])
    events = await live.events(PATH, {"prompt": "a fox", "echo": True, "max_tokens": 2})
    assert "".join(e["choices"][0]["text"] for e in events) == body["choices"][0]["text"]


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_with_logprobs_serves_loglikelihood(live, tokenizer, max_tokens):
    ids = tokenizer.encode("a fox found")
    asked = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    _, body, _ = await live.post(PATH, asked)
    choice = body["choices"][0]
    columns = choice["logprobs"]
    assert columns["tokens"] == [
        tokenizer.token_text(i) for i in [*ids, *live.engine.script[:max_tokens]]
    ]
    assert "".join(columns["tokens"]) == choice["text"]
    assert columns["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1 + max_tokens)
    assert columns["top_logprobs"][0] is None
    assert columns["top_logprobs"][1] == {columns["tokens"][1]: -0.5}
    assert columns["text_offset"][1] == len(columns["tokens"][0])
    assert body["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"


async def test_streamed_logprobs_are_whole_ones(live):
    asked = {"prompt": "a fox", "logprobs": 2, "max_tokens": 6}
    _, whole, _ = await live.post(PATH, asked)
    events = await live.events(PATH, asked)
    columns = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    for name, values in whole["choices"][0]["logprobs"].items():
        assert [v for c in columns for v in c[name]] == values


async def test_prompt_logprobs(live, tokenizer):
    ids = tokenizer.encode("a fox found")
    asked = {"prompt": ids, "prompt_logprobs": 2, "max_tokens": 1, "return_token_ids": True}
    _, body, _ = await live.post(PATH, asked)
    rows = body["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert rows[1][str(ids[1])] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": tokenizer.token_text(ids[1]),
    }
    assert len(rows) == len(ids)
    assert body["choices"][0]["prompt_token_ids"] == ids
    assert body["choices"][0]["token_ids"] == live.engine.script[:1]


async def test_one_bad_prompt_of_several_runs_none(live):
    status, body, _ = await live.post(PATH, {"prompt": [[1], [2], [10**6]]})
    assert status == 400
    assert "vocabulary" in body["error"]["message"]
    assert not live.engine.rows


async def test_tokenize_and_detokenize(live, tokenizer):
    _, body, _ = await live.post("/tokenize", {"prompt": "a fox", "return_token_strs": True})
    ids = tokenizer.encode("a fox")
    assert body == {
        "count": len(ids),
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(i) for i in ids],
    }
    assert (await live.post("/v1/tokenize", {"prompt": "a fox", "return_token_strs": True}))[
        1
    ] == body
    for path in ("/detokenize", "/v1/detokenize"):
        _, body, _ = await live.post(path, {"tokens": ids})
        assert body == {"prompt": "a fox"}
    _, chat, _ = await live.post("/tokenize", {"messages": [{"role": "user", "content": "a fox"}]})
    assert tokenizer.decode(chat["tokens"], skip_special_tokens=False).startswith(
        "<|im_start|>user\na fox<|im_end|>"
    )
    for bad in ({}, {"prompt": "a", "messages": []}, {"tokens": [-1]}, {"tokens": ["1"]}):
        path = "/detokenize" if "tokens" in bad else "/tokenize"
        assert (await live.post(path, bad))[0] == 400
