"""The body parser against arbitrary bytes: a struct or a 400, nothing else."""

from __future__ import annotations

import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.errors import InvalidRequest
from moeserve.server.body import MAX_DEPTH, _check_shape, parse_object
from moeserve.server.chat_request import ChatRequest
from moeserve.server.dialects.completions import CompletionRequest
from moeserve.server.requests import convert, decode, unknown_fields

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
names = st.sampled_from(
    [
        *ChatRequest.__struct_fields__,
        *CompletionRequest.__struct_fields__,
        "tools",
        "response_format",
    ]
)


def refusal(call, *args) -> InvalidRequest | None:
    """The InvalidRequest that it raises, or None. Any other exception is a failure."""
    try:
        call(*args)
    except InvalidRequest as error:
        return error
    return None


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes(body):
    error = refusal(parse_object, body)
    if error is not None:
        assert error.code == "invalid_json"
        assert len(error.message) < 300


@given(st.dictionaries(names, values, max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_fields(fields):
    for kind in (ChatRequest, CompletionRequest):
        error = refusal(decode, fields, kind)
        assert error is None or error.code


@given(st.dictionaries(st.text(), values, max_size=4))
@settings(max_examples=200, deadline=None)
def test_what_python_writes_is_read_back(value):
    text = json.dumps(value)
    if "NaN" in text or "Infinity" in text or "\\ud" in text.lower():
        return
    assert parse_object(text.encode()) == json.loads(text)


def test_depth_is_counted_outside_of_strings():
    inside = {"a": "[" * 500 + '\\"{' * 500}
    assert parse_object(json.dumps(inside).encode()) == inside
    fits = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_object(fits)
    with pytest.raises(InvalidRequest, match="deeper"):
        parse_object(fits.replace(b"[]", b"[[]]"))
    wide = b'{"a":[' + b"[]," * 500 + b"[]]}"
    assert parse_object(wide)


class Inner(msgspec.Struct):
    x: int


class Outer(msgspec.Struct):
    rows: list[Inner]


def test_fields_are_named_by_path():
    with pytest.raises(InvalidRequest) as caught:
        convert({"rows": [{"x": 1}, {"x": "no"}]}, Outer)
    assert caught.value.param == "rows[1].x"
    assert caught.value.message == "rows[1].x must be an integer, got a string"
    assert unknown_fields({"rowz": 1}, frozenset(["rows"])) == ["rowz (did you mean rows?)"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "messages", "messages is required"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens must be an integer or null, got a string"),
        ({"stop": 5}, "stop", "stop must be a string or an array or null, got an integer"),
        ({"stream": []}, "stream", "stream must be true or false or null, got an array"),
        ({"priority": 2**40}, "priority", "priority must be an integer <= 2147483647"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is required"),
        ({"messages": 1}, "messages", "messages must be an array, got an integer"),
    ],
)
def test_refusals_are_in_the_words_of_json(fields, param, message):
    with pytest.raises(InvalidRequest) as caught:
        convert(({"messages": []} if fields else {}) | fields, ChatRequest)
    assert (caught.value.param, caught.value.message) == (param, message)


@pytest.mark.parametrize("filling", [rb"\n", rb"a\n", b"a", rb"\\"])
def test_checking_a_long_string_takes_no_memory(filling):
    body = b'{"a":[' + b"[]," * 70 + b'"' + filling * 1_000_000 + b'"]}'
    tracemalloc.start()
    try:
        _check_shape(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000, peak
