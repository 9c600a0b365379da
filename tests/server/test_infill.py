"""Fill in the middle: /infill as editors send it, and `suffix` of /v1/completions."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.server.conftest import live_server, make_tokenizer, until

PATH = "/infill"
COMPLETIONS = "/v1/completions"
GAP = {"input_prefix": "def f(", "input_suffix": "return 1"}
CHUNKS = [{"filename": "a.py", "text": "A = 1\n"}]
# What llama.vim and llama.vscode send to have other files in the cache.
VIM_WARM_UP = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": [{"text": "A = 1\n", "time": [1, 2], "filename": "a.py"}],
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
VSCODE_WARM_UP = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": CHUNKS,
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
TIMINGS = ["prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"]
TIMINGS += ["predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"]
VIM_FIELDS = ["content", *(f"timings/{name}" for name in TIMINGS), "truncated", "tokens_cached"]
VIM = {
    "id_slot": 0,
    "input_prefix": "def f():\n",
    "input_suffix": "\n",
    "input_extra": CHUNKS,
    "prompt": "    return ",
    "n_predict": 8,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": VIM_FIELDS,
}


@pytest.fixture
def writing(launch, tokenizer):
    """Return a server whose model writes a text."""

    @asynccontextmanager
    async def start(text: str, **settings: Any):
        async with launch(**settings) as live:
            live.engine.script = tokenizer.encode(text, special=False)
            yield live

    return start


async def frames(live: Any, body: dict[str, Any]) -> list[Any]:
    """Return the objects of a stream, which has no [DONE]."""
    async with live.session.post(live.url + PATH, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        parts = (await response.text()).split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def test_an_answer_has_the_shape_of_llama_cpp(live, tokenizer):
    status, answer, response = await live.post(PATH, GAP | {"n_predict": 5, "seed": 7})
    assert status == 200
    assert "Warning" not in response.headers
    assert live.engine.prompt == "<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>"
    timings = answer.pop("timings")
    num_prompt = live.engine.submitted.num_prompt
    settings = answer.pop("generation_settings")
    assert answer == {
        "index": 0,
        "content": tokenizer.decode(live.engine.script[:5]),
        "tokens": [],
        "stop": True,
        "model": "org/tiny",
        "tokens_predicted": 5,
        "tokens_evaluated": num_prompt,
        "prompt": live.engine.prompt,
        "has_new_line": False,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
        "tokens_cached": 2,
    }
    assert timings.keys() == {"cache_n", *TIMINGS}
    assert (timings["cache_n"], timings["prompt_n"]) == (2, num_prompt - 2)
    assert timings["predicted_n"] == 5
    assert timings["prompt_ms"] > 0
    assert (settings["seed"], settings["n_predict"], settings["stream"]) == (7, 5, False)


async def test_without_n_predict_the_answer_goes_on_to_its_end(live, story):
    _, answer, _ = await live.post(PATH, GAP)
    assert (answer["content"], answer["stop_type"]) == (story, "eos")
    assert answer["generation_settings"]["n_predict"] == -1


async def test_a_request_of_llama_vim(writing):
    async with writing("x + 1\n    y\nz<|im_end|>") as live:
        async with live.session.post(live.url + PATH, json=VIM) as response:
            raw = await response.text()
        answer = json.loads(raw)
        # The plugin looks for this text before it decodes the answer.
        assert raw.startswith("{")
        assert '"content":"' in raw
        assert set(answer) == set(VIM_FIELDS)
        assert (answer["content"], answer["truncated"]) == (
            "x + 1\n    y\n"[: len(answer["content"])],
            False,
        )
        assert live.engine.prompt == (
            "<|repo_name|>myproject\n<|file_sep|>a.py\nA = 1\n<|file_sep|>filename\n"
            "<|fim_prefix|>def f():\n    return <|fim_suffix|>\n<|fim_middle|>"
        )


async def test_a_warm_up_only_reads_the_prompt(live):
    for body, fields in ((VIM_WARM_UP, set()), (VSCODE_WARM_UP, None)):
        status, answer, response = await live.post(PATH, body)
        assert status == 200
        if fields is not None:
            assert set(answer) == fields
        else:
            assert (answer["content"], answer["tokens_predicted"]) == ("", 0)
            assert (answer["stop"], answer["stop_type"]) == (True, "limit")
        assert live.engine.submitted.sampling.max_tokens == 1
        ignored = "no effect here: id_slot, t_max_prompt_ms"
        if "temperature" in body:  # whose sampler is not listed
            ignored += ", temperature"
        assert f'"{ignored}"' in response.headers["Warning"]
        # What the next request begins with
        assert live.engine.prompt == (
            "<|repo_name|>myproject\n<|file_sep|>a.py\nA = 1\n<|file_sep|>filename\n"
            "<|fim_prefix|><|fim_suffix|><|fim_middle|>"
        )
    (only,) = await frames(live, VSCODE_WARM_UP)
    assert (only["content"], only["stop"]) == ("", True)


async def test_several_answers_are_a_list(live):
    _, one, _ = await live.post(PATH, GAP | {"n_predict": 6})
    for name in ("n_cmpl", "n"):
        _, answers, _ = await live.post(PATH, GAP | {"n_predict": 6, name: 3})
        assert [answer["index"] for answer in answers] == [0, 1, 2]
        assert {answer["content"] for answer in answers} == {one["content"]}
    seeds = [answer["generation_settings"]["seed"] for answer in answers]
    assert seeds == [seeds[0], seeds[0] + 1, seeds[0] + 2]


async def test_a_stream_has_the_whole_answer(live):
    body = GAP | {"n_predict": 9, "n_cmpl": 2, "return_tokens": True}
    _, whole, _ = await live.post(PATH, body)
    texts = ["", ""]
    tokens: list[list[int]] = [[], []]
    last = {}
    for frame in await frames(live, body):
        assert frame["index"] not in last
        texts[frame["index"]] += frame["content"]
        tokens[frame["index"]] += frame["tokens"]
        if frame["stop"]:
            last[frame["index"]] = frame
    assert texts == [answer["content"] for answer in whole]
    assert tokens == [answer["tokens"] for answer in whole]
    assert len(tokens[0]) == 9
    changing = ("content", "tokens", "timings", "generation_settings")
    for index, answer in enumerate(whole):
        assert last[index].keys() == answer.keys()
        for name in answer.keys() - set(changing):
            assert last[index][name] == answer[name]


async def test_the_last_frame_has_the_fields_that_were_asked_for(live):
    *chunks, last = await frames(live, GAP | {"n_predict": 3, "response_fields": ["stop", "x/y"]})
    assert last == {"stop": True}
    assert all(chunk["stop"] is False for chunk in chunks)


@pytest.mark.parametrize("token", ["<|fim_pad|>", "<|file_sep|>", "<|fim_middle|>", "<|im_end|>"])
async def test_markers_end_an_answer_and_are_not_in_its_text(writing, token):
    async with writing(f"x = 1{token}def g") as live:
        _, answer, _ = await live.post(PATH, GAP)
        assert (answer["content"], answer["stop_type"]) == ("x = 1", "eos")
        texts = [frame["content"] for frame in await frames(live, GAP)]
        assert "".join(texts) == "x = 1"
        asked = {"prompt": "def f(", "suffix": "return 1", "max_tokens": 50}
        _, body, _ = await live.post(COMPLETIONS, asked)
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (
            "x = 1",
            "stop",
        )


async def test_markers_do_not_end_other_answers(writing):
    async with writing("x<|file_sep|>y<|im_end|>") as live:
        _, body, _ = await live.post(COMPLETIONS, {"prompt": "a", "suffix": ""})
        assert body["choices"][0]["text"] == "x<|file_sep|>y"
        chat = {"messages": [{"role": "user", "content": "a"}]}
        _, body, _ = await live.post("/v1/chat/completions", chat)
        assert body["choices"][0]["message"]["content"] == "x<|file_sep|>y"


async def test_stop_strings_and_limits_end_an_answer(writing):
    async with writing("a\n    b\n    STOP\nc\n<|im_end|>") as live:
        _, answer, _ = await live.post(PATH, GAP | {"stop": ["STOP"]})
        assert answer["content"] == "a\n    b\n    "
        assert (answer["stop_type"], answer["stopping_word"]) == ("word", "STOP")
        _, answer, _ = await live.post(PATH, GAP | {"n_indent": 4})
        assert answer["content"] == "a\n    b\n    STOP\n"
        assert (answer["stop_type"], answer["stopping_word"]) == ("limit", "")
        assert answer["has_new_line"]
        texts = [frame["content"] for frame in await frames(live, GAP | {"n_indent": 4})]
        assert "".join(texts) == "a\n    b\n    STOP\n"
        await until(lambda: not live.engine.rows)  # the engine was told


async def test_time_ends_an_answer_at_a_line(writing):
    async with writing("line\n" * 2000, context=8192) as live:
        _, answer, _ = await live.post(PATH, GAP | {"t_max_predict_ms": 20})
        assert answer["content"].endswith("line\n")
        assert answer["stop_type"] == "limit"
        assert answer["tokens_predicted"] < len(live.engine.script)
        await until(lambda: not live.engine.rows)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0.7, 0, 1.0, 0.0, 1.0)),  # the model's defaults
        ({"temperature": 0.2, "top_k": 3, "min_p": 0.1}, (0.2, 3, 1.0, 0.1, 1.0)),
        ({"samplers": ["top_k"], "top_k": 3, "top_p": 0.5}, (1.0, 3, 1.0, 0.0, 1.0)),
        ({"samplers": ["top_k", "infill"], "top_k": 3}, (1.0, 3, 1.0, 1 / 3, 1.0)),
        ({"samplers": ["infill"], "min_p": 0.5, "temperature": 0}, (1.0, 0, 1.0, 1 / 3, 1.0)),
        ({"samplers": ["infill", "min_p"], "min_p": 0.1}, (1.0, 0, 1.0, 1 / 3, 1.0)),
        ({"samplers": ["infill", "min_p"], "min_p": 0.5}, (1.0, 0, 1.0, 0.5, 1.0)),
        ({"samplers": ["temperature", "dry"], "repeat_penalty": 1.1}, (0.7, 0, 1.0, 0.0, 1.0)),
        ({"samplers": ["penalties"], "repeat_penalty": 1.1}, (1.0, 0, 1.0, 0.0, 1.1)),
    ],
)
async def test_samplers(launch, fields, expected):
    async with launch(defaults={"temperature": 0.7}) as live:
        status, answer, _ = await live.post(PATH, GAP | fields | {"n_predict": 1})
        assert status == 200, answer
        sampling = live.engine.submitted.sampling
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        assert tuple(getattr(sampling, name) for name in names) == expected
        settings = answer["generation_settings"]
        assert (settings["temperature"], settings["min_p"]) == (expected[0], expected[3])


async def test_what_does_not_fit_is_left_out(live):
    body = {
        "input_prefix": "first line\n" * 500 + "last",
        "input_suffix": "next" + "\nanother line" * 500,
        "input_extra": CHUNKS,
        "n_predict": 16,
    }
    status, answer, _ = await live.post(PATH, body)
    assert status == 200
    assert answer["truncated"]
    assert answer["tokens_evaluated"] == live.engine.context - 16
    assert "last<|fim_suffix|>next" in live.engine.prompt
    assert answer["tokens_predicted"] == 16
    # Without a limit, and with a large one, a quarter of the context is for the answer.
    for n_predict in (-1, 10**6):
        _, answer, _ = await live.post(PATH, body | {"n_predict": n_predict})
        assert answer["tokens_evaluated"] == live.engine.context * 3 // 4


async def test_markers_in_a_users_text_are_text(live, tokenizer):
    body = {
        "input_prefix": "a<|fim_suffix|>",
        "prompt": "<|im_end|>",
        "input_suffix": "<|fim_middle|>",
        "input_extra": [{"text": "<|repo_name|>"}],
        "n_predict": 1,
    }
    await live.post(PATH, body)
    submitted = live.engine.submitted
    ids = memoryview(submitted.tokens).cast("i")[: submitted.num_prompt].tolist()
    for text in ("<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>"):
        assert ids.count(tokenizer.backend.token_to_id(text)) == 1
    assert tokenizer.backend.token_to_id("<|im_end|>") not in ids


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_suffix": ["a"]}, "input_suffix"),
        ({"prompt": 1}, "prompt"),
        ({"input_extra": {}}, "input_extra"),
        ({"input_extra": [{}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": "ok"}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": 123, "text": "abc"}]}, "input_extra[0].filename"),
        ({"input_extra": ["a"]}, "input_extra[0]"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": "8"}, "n_predict"),
        ({"n_indent": -1}, "n_indent"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"t_max_predict_ms": -2}, "t_max_predict_ms"),
        ({"samplers": "kp"}, "samplers"),
        ({"samplers": ["top_k", "top_x"]}, "samplers[1]"),
        ({"samplers": ["top_k"] * 65}, "samplers"),
        ({"response_fields": "content"}, "response_fields"),
        ({"response_fields": [1]}, "response_fields[0]"),
        ({"response_fields": ["a/" * 200]}, "response_fields[0]"),
        ({"stop": [""]}, "stop[0]"),
        ({"n_probs": 3}, "n_probs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"mirostat": 2}, "mirostat"),
        ({"dry_multiplier": 0.5}, "dry_multiplier"),
        ({"temperature": 9}, "temperature"),
    ],
)
async def test_bad_requests(live, change, param):
    status, answer, _ = await live.post(PATH, GAP | change)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert not live.engine.told


async def test_fields_that_are_off_are_taken(live):
    off = {"n_probs": 0, "lora": [], "mirostat": 0, "dry_multiplier": 0.0, "xtc_probability": 0}
    more = {"grammar": "", "id_slot": -1, "cache_prompt": True, "input_extra": None, "prompt": None}
    status, answer, response = await live.post(PATH, GAP | off | more | {"n_predict": 1})
    assert status == 200, answer
    assert "Warning" not in response.headers
    unknown = GAP | {"n_predict": 1, "input_extra": [{"text": "a", "time": 1}], "n_predikt": 2}
    _, _, response = await live.post(PATH, unknown)
    assert "n_predikt (did you mean n_predict?), input_extra[0].time" in response.headers["Warning"]


async def test_a_constraint_holds_for_the_gap(live):
    body = GAP | {"structured_outputs": {"choice": ["yes", "no"]}, "n_predict": 3}
    status, answer, _ = await live.post(PATH, body)
    assert status == 200, answer
    assert live.engine.submitted.sampling.grammar is not None
    status, answer, _ = await live.post(PATH, GAP | {"guided_regex": "("})
    assert (status, answer["error"]["param"]) == (400, "guided_regex")


async def test_a_failure_inside_a_stream_is_its_last_frame(launch):
    async with launch() as live:
        live.engine.break_after = 3
        *_, last = await frames(live, GAP)
        assert last["error"]["type"] == "server_error"
        status, _, _ = await live.post(PATH, GAP)
        assert status == 500


async def test_a_model_without_the_tokens_refuses():
    async with live_server(make_tokenizer(fim_tokens=())) as live:
        for path, body, param in (
            (PATH, GAP, "input_suffix"),
            (PATH, GAP | {"stream": True}, "input_suffix"),
            (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        ):
            status, answer, _ = await live.post(path, body)
            assert status == 400
            assert answer["error"]["param"] == param
            assert answer["error"]["code"] == "unsupported_parameter"
            assert "such as Qwen3-Coder" in answer["error"]["message"]
        status, _, _ = await live.post(COMPLETIONS, {"prompt": "a", "suffix": ""})
        assert status == 200


# ---- suffix of /v1/completions

AROUND = {"prompt": "def f(", "suffix": "return 1", "max_tokens": 6}
ARRANGED = "<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>"


async def test_suffix_of_a_completion(live, tokenizer):
    status, body, _ = await live.post(COMPLETIONS, AROUND | {"return_token_ids": True})
    assert status == 200
    assert live.engine.prompt == ARRANGED
    choice = body["choices"][0]
    assert choice["text"] == tokenizer.decode(live.engine.script[:6])
    assert choice["prompt_token_ids"] == tokenizer.encode(ARRANGED)
    assert body["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])


async def test_suffix_with_several_answers_streams_and_logprobs(live):
    asked = AROUND | {"n": 2, "logprobs": 1}
    _, whole, _ = await live.post(COMPLETIONS, asked)
    texts = ["", ""]
    for event in await live.events(COMPLETIONS, asked):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    columns = whole["choices"][0]["logprobs"]
    assert "".join(columns["tokens"]) == texts[0]
    assert columns["text_offset"][0] == 0


async def test_each_of_several_prompts_has_the_suffix(live, tokenizer):
    ids = tokenizer.encode("def f(")
    for prompt in (["def f(", ""], [ids, ids], ids):
        status, body, _ = await live.post(COMPLETIONS, AROUND | {"prompt": prompt})
        assert status == 200, body
        num_prompts = len(prompt) if prompt is not ids else 1
        assert len(body["choices"]) == num_prompts
        assert live.engine.prompt == (ARRANGED.replace("def f(", "") if "" in prompt else ARRANGED)


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"suffix": 5}, "suffix", "invalid_value"),
        ({"suffix": ["a"]}, "suffix", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": "a fox " * 100}, "prompt", "context_length_exceeded"),
        ({"suffix": "a fox " * 100}, "prompt", "context_length_exceeded"),
        ({"suffix": "x" * 10**6}, "prompt", "context_length_exceeded"),
        ({"prompt": [10**6]}, "prompt", "invalid_value"),
    ],
)
async def test_bad_suffixes(live, change, param, code):
    status, answer, _ = await live.post(COMPLETIONS, AROUND | change)
    assert status == 400
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code), answer


async def test_without_a_suffix_a_prompt_must_not_be_empty(live):
    status, answer, _ = await live.post(COMPLETIONS, {"prompt": "", "suffix": ""})
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_many_prompts_encode_their_suffix_once(live, monkeypatch):
    tokenizer = live.front.tokenizer
    encoded = []
    encode = tokenizer.encode_plain
    monkeypatch.setattr(
        tokenizer, "encode_plain", lambda text: encoded.append(text) or encode(text)
    )
    body = {"prompt": ["a", "b", "c"], "suffix": "the end", "max_tokens": 1}
    status, answer, _ = await live.post(COMPLETIONS, body)
    assert status == 200, answer
    assert len(answer["choices"]) == 3
    assert encoded.count("the end") == 1
