"""The request field `logits_processors`: what reaches the engine, and what is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.logits_processors import MAX_ARGS

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a fox"}]})
COMPLETION = ("/v1/completions", {"prompt": "a fox"})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, ()),
        ([], ()),
        (["one"], (("one", "{}"),)),
        (
            [{"name": "two", "args": {"x": [1, None, "ä"]}}, "one"],
            (("two", '{"x":[1,null,"ä"]}'), ("one", "{}")),
        ),
        (["one"] * 8, (("one", "{}"),) * 8),
    ],
)
async def test_what_reaches_the_engine(live: Any, asked: Any, expected: Any) -> None:
    live.front._processors = {"one", "two"}
    for path, body in (CHAT, COMPLETION):
        status, _, _ = await live.post(
            path, body | {"model": "org/tiny", "max_tokens": 2, "logits_processors": asked}
        )
        assert status == 200
        assert live.engine.told[-1].sampling.processors == expected


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        (["three"], "logits_processors", "'three' is unknown; known: one, two"),
        ([{"name": "os:system", "args": {}}], "logits_processors", "known: one, two"),
        ([{"qualname": "os.system", "args": []}], "logits_processors[0]", "qualname"),
        ([{"args": {}}], "logits_processors[0].name", "required"),
        ([{"name": "one", "args": "x"}], "logits_processors[0].args", "object"),
        ([{"name": "one", "args": {"x": "x" * MAX_ARGS}}], "logits_processors", "bytes of JSON"),
        ([""], "logits_processors[0]", "length"),
        ([1], "logits_processors[0]", "string"),
        ("one", "logits_processors", "array"),
        ({"name": "one"}, "logits_processors", "array"),
        (["one"] * 9, "logits_processors", "length <= 8"),
    ],
)
async def test_what_is_refused(live: Any, asked: Any, param: str, message: str) -> None:
    live.front._processors = {"one", "two"}
    for path, body in (CHAT, COMPLETION):
        status, answer, _ = await live.post(
            path, body | {"model": "org/tiny", "logits_processors": asked}
        )
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert message in answer["error"]["message"]
    assert not live.engine.told


async def test_there_may_be_none(live: Any) -> None:
    status, answer, _ = await live.post(
        CHAT[0], CHAT[1] | {"model": "org/tiny", "logits_processors": ["x"]}
    )
    assert (status, answer["error"]["message"]) == (
        400,
        "logits_processors: 'x' is unknown; known: none",
    )
