"""Whole answers: typed, retried, and refused with the right error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moeserve import AsyncClient, errors
from tests.client.scripted import Reply, Server, answer, error, hang_up

CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 5,
    "model": "demo",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "new_field": 1},
            "finish_reason": "stop",
            "logprobs": {
                "content": [
                    {"token": "He", "logprob": -0.5, "bytes": [72, 101], "top_logprobs": []}
                ]
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    "unknown": {"deep": [1]},
}
ASK: Any = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_a_chat_answer_has_attributes_like_openais(
    server: Server, client: AsyncClient
) -> None:
    server.script = [answer(CHAT, x_request_id="r1")]
    got = await client.chat.completions.create(
        **ASK,
        model="demo",
        temperature=0.5,
        seed=None,
        extra_body={"top_k": 4},
        extra_headers={"X-Tag": "t"},
    )
    assert got.choices[0].message.content == "Hello"
    assert got.choices[0].logprobs is not None
    assert got.choices[0].logprobs.content is not None
    assert got.choices[0].logprobs.content[0].bytes == [72, 101]
    assert got.usage is not None
    assert got.usage.total_tokens == 5
    assert got.request_id == "r1"
    sent = {"messages": ASK["messages"], "model": "demo", "temperature": 0.5, "top_k": 4}
    assert server.seen == [("POST", "/v1/chat/completions", sent)]
    assert server.headers[0]["x-tag"] == "t"


async def test_every_route(server: Server, client: AsyncClient) -> None:
    server.script = [
        answer(
            {"choices": [{"text": "abc", "logprobs": {"tokens": ["a"], "token_logprobs": [None]}}]}
        ),
        answer({"object": "list", "data": [{"id": "org/name", "max_model_len": 64}]}),
        answer({"id": "org/name"}),
        answer({"tokens": [1, 2], "count": 2}),
        answer({"prompt": "hi"}),
        answer({"id": "a/b", "aborted": 2}),
    ]
    completion = await client.completions.create(prompt=[1, 2, 3], max_tokens=4)
    assert completion.choices[0].text == "abc"
    assert (await client.models.list()).data[0].max_model_len == 64
    assert (await client.models.retrieve("org/name")).id == "org/name"
    assert (await client.tokenize("hi")).tokens == [1, 2]
    assert (await client.detokenize([1, 2])).prompt == "hi"
    assert (await client.requests.abort("a/b")).aborted == 2
    assert server.seen == [
        ("POST", "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/org/name", None),
        ("POST", "/tokenize", {"prompt": "hi"}),
        ("POST", "/detokenize", {"tokens": [1, 2]}),
        ("DELETE", "/v1/requests/a/b", None),
    ]


async def test_the_key_is_sent_as_a_bearer_token(server: Server) -> None:
    server.script = [answer({"data": []})]
    async with AsyncClient(server.url, api_key="s3cret") as client:
        await client.models.list()
    assert server.headers[0]["authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    ("reply", "kind", "status", "code"),
    [
        (error(400, "invalid_value", param="top_p"), errors.InvalidRequest, 400, "invalid_value"),
        (
            error(400, "context_length_exceeded"),
            errors.ContextLengthExceeded,
            400,
            "context_length_exceeded",
        ),
        (error(401, "invalid_api_key"), errors.Unauthorized, 401, "invalid_api_key"),
        (error(403), errors.Forbidden, 403, "insufficient_permissions"),
        (error(404, "model_not_found"), errors.ModelNotFound, 404, "model_not_found"),
        (error(404), errors.NotFound, 404, "not_found"),
        (error(409), errors.Conflict, 409, "conflict"),
        (error(413), errors.PayloadTooLarge, 413, "payload_too_large"),
        (error(415), errors.UnsupportedMedia, 415, "unsupported_media_type"),
        (error(418), errors.RequestError, 418, None),
        (error(429, "rate", x_should_retry="false"), errors.Overloaded, 429, "rate"),
        (error(500), errors.RequestFailed, 500, "internal_error"),
        (
            error(503, "server_overloaded", retry_after="300"),
            errors.Overloaded,
            503,
            "server_overloaded",
        ),
        (error(503, "engine_lost"), errors.EngineLost, 503, "engine_lost"),
        (error(504), errors.RequestFailed, 504, "internal_error"),
        (answer({"error": "Unauthorized"}, 401), errors.Unauthorized, 401, "invalid_api_key"),
        (
            answer({"object": "error", "message": "flat"}, 400),
            errors.InvalidRequest,
            400,
            "invalid_value",
        ),
        (answer([1], 502), errors.RequestFailed, 502, "internal_error"),
    ],
)
async def test_errors_become_ours(
    server: Server,
    client: AsyncClient,
    reply: Reply,
    kind: type[errors.RequestError],
    status: int,
    code: str,
) -> None:
    server.script = [reply]
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(**ASK)
    assert type(caught.value) is kind
    assert (caught.value.http_status, caught.value.code) == (status, code)


async def test_an_error_carries_param_request_id_and_the_wait(
    server: Server, client: AsyncClient
) -> None:
    server.script = [error(503, "server_overloaded", "queue full", "n", retry_after="300")]
    with pytest.raises(errors.Overloaded, match="queue full") as caught:
        await client.chat.completions.create(**ASK)
    assert (caught.value.param, caught.value.request_id) == ("n", "req-7")
    assert caught.value.retry_after_s == 300
    assert len(server.seen) == 1  # 300 s is too long to wait: the caller decides


@pytest.mark.parametrize(
    "first", [error(503, retry_after_ms="1"), error(429), error(500), error(408), hang_up()]
)
async def test_a_flaky_server_is_asked_again(
    server: Server, client: AsyncClient, first: Reply
) -> None:
    server.script = [first, first, answer(CHAT)]
    assert (await client.chat.completions.create(**ASK)).id == "chatcmpl-1"
    assert len(server.seen) == 3
    assert server.seen[0] == server.seen[2]


async def test_retries_end_and_the_last_error_is_raised(
    server: Server, client: AsyncClient
) -> None:
    server.script = [error(500), error(500), error(503, message="third")]
    with pytest.raises(errors.Overloaded, match="third"):
        await client.chat.completions.create(**ASK)
    assert len(server.seen) == 3


async def test_client_errors_are_not_tried_again(server: Server, client: AsyncClient) -> None:
    server.script = [error(400)]
    with pytest.raises(errors.InvalidRequest):
        await client.chat.completions.create(**ASK)
    assert len(server.seen) == 1


async def test_a_refused_connection_says_so(unused_port: int) -> None:
    async with AsyncClient(f"http://127.0.0.1:{unused_port}/v1", max_retries=0) as client:
        with pytest.raises(errors.Unreachable, match="is the server running") as caught:
            await client.models.list()
    assert caught.value.http_status == 0


async def test_silence_is_a_timeout(server: Server) -> None:
    async def silent(request: object) -> Any:
        await asyncio.Event().wait()

    server.script = [silent]
    async with AsyncClient(server.url, timeout_s=0.05, max_retries=0) as client:
        with pytest.raises(errors.Unreachable, match=r"no byte for 0\.05 s") as caught:
            await client.models.list()
    assert caught.value.code == "timeout"


async def test_an_answer_of_the_wrong_shape_is_an_error(
    server: Server, client: AsyncClient
) -> None:
    server.script = [answer({"choices": 3})]
    with pytest.raises(errors.Unreachable, match="not a ChatCompletion"):
        await client.chat.completions.create(**ASK)


async def test_cancelling_closes_the_socket(server: Server, client: AsyncClient) -> None:
    started = asyncio.Event()

    async def slow(request: object) -> Any:
        started.set()
        await asyncio.Event().wait()

    server.script = [slow]
    task = asyncio.create_task(client.chat.completions.create(**ASK))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await server.vanished.wait()


async def test_wait_ready_polls_until_200(server: Server, client: AsyncClient) -> None:
    server.script = [error(503), error(503), answer({"status": "ready"})]
    await client.wait_ready(30)
    assert [path for _, path, _ in server.seen] == ["/readyz"] * 3


async def test_wait_ready_gives_up_with_the_servers_last_word(
    server: Server, client: AsyncClient
) -> None:
    server.script = [error(503, message="loading weights 40%")]
    with pytest.raises(errors.Unreachable, match=r"not ready after 0\.1 s: loading weights 40%"):
        await client.wait_ready(0.1)


async def test_wait_ready_uses_health_where_there_is_no_readyz(
    server: Server, client: AsyncClient
) -> None:
    server.script = [error(404), answer({})]
    await client.wait_ready(30)
    assert [path for _, path, _ in server.seen] == ["/readyz", "/health"]


@pytest.mark.parametrize(
    "bad", [{"base_url": "localhost:8000"}, {"timeout_s": 0}, {"max_retries": -1}]
)
def test_bad_arguments_are_refused_at_once(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        AsyncClient(**bad)
