"""The asyncio client of moeserve and of any other OpenAI-compatible server."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, overload
from urllib.parse import quote

from aiohttp import ClientResponse

from moeserve import protocol
from moeserve.client.stream import Stream
from moeserve.client.transport import Transport
from moeserve.errors import RequestError, Unreachable

Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
MAX_RESUME_TRIES = 6  # over about 20 s
FIRST_POLL_INTERVAL_S = 0.02
MAX_POLL_INTERVAL_S = 0.5


class AsyncClient:
    """One server, many concurrent requests.

        async with AsyncClient("http://127.0.0.1:8000/v1") as client:
            messages = [{"role": "user", "content": "Hi"}]
            answer = await client.chat.completions.create(messages=messages)
            print(answer.choices[0].message.content)

    The names are those of `openai.AsyncOpenAI`; answers are typed objects. Cancelling a task or
    leaving a stream closes its socket, and the server aborts the request. Errors are the
    `RequestError`s of `moeserve.errors`, with http_status, code, param and request_id.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000/v1",
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        """
        Args:
            timeout_s: Seconds of silence after which a request fails.
            max_retries: Further tries after a lost connection, 408, 409, 429 or 5xx, before the
                first byte of an answer. Before each it waits 0.5 to 8 s, or as long as the server
                says (`retry-after-ms` or `Retry-After`, up to 120 s). A stream that breaks is
                resumed, if the server keeps streams, unless this is 0.
        """
        if timeout_s <= 0 or max_retries < 0:
            raise ValueError(
                f"timeout_s must be > 0 and max_retries >= 0, got {timeout_s} and {max_retries}"
            )
        self.transport = Transport(base_url, api_key, timeout_s, max_retries)
        self.chat = Chat(self.transport)
        self.completions = Completions(self.transport)
        self.models = Models(self.transport)
        self.requests = Requests(self.transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; the server aborts what still runs on them."""
        await self.transport.close()

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> protocol.Tokenized:
        """Return the token ids of a text, or of chat messages after the chat template."""
        body = _without_none(prompt=prompt, messages=messages) | fields
        return await self.transport.fetch(
            "POST", f"{self.transport.root_url}/tokenize", protocol.Tokenized, body
        )

    async def detokenize(self, tokens: Sequence[int], **fields: Any) -> protocol.Detokenized:
        """Return the text of token ids."""
        body = {"tokens": list(tokens)} | fields
        return await self.transport.fetch(
            "POST", f"{self.transport.root_url}/detokenize", protocol.Detokenized, body
        )

    async def experts(self) -> protocol.ExpertStatus:
        """Return the experts, ranks and engines of a moeserve server, and their load.

        Raises NotFound if the model has no experts.
        """
        return await self.transport.fetch(
            "GET", f"{self.transport.base_url}/experts", protocol.ExpertStatus
        )

    async def watch_experts(self, interval_s: float = 1.0) -> Stream[protocol.ExpertStatus]:
        """Return a stream with the result of `experts` every `interval_s` seconds, until the
        server drains.
        """
        url = f"{self.transport.base_url}/experts?stream=true&interval_s={interval_s:g}"
        return Stream(
            await self.transport.open("GET", url), protocol.ExpertStatus, self.transport.timeout_s
        )

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the server accepts requests. Raises Unreachable with its last error after
        timeout_s.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        interval_s = FIRST_POLL_INTERVAL_S
        path = "/readyz"
        while True:
            left_s = max(deadline_s - loop.time(), 0.05)
            try:
                url = self.transport.root_url + path
                await self.transport.read("GET", url, timeout_s=min(left_s, 5.0), max_retries=0)
                return
            except RequestError as error:
                if error.http_status in (401, 403):
                    raise
                if error.http_status in (404, 405) and path == "/readyz":
                    path = "/health"  # another engine's server
                    continue
                if loop.time() + interval_s >= deadline_s:
                    raise Unreachable(
                        f"not ready after {timeout_s:g} s: {error.message}"
                    ) from error
            await asyncio.sleep(interval_s)
            interval_s = min(interval_s * 1.5, MAX_POLL_INTERVAL_S)


class _Resource:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def _create(
        self,
        path: str,
        *,
        whole: type[protocol.Answer],
        chunk: type[protocol.Answer],
        extra_body: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Any:
        """Return an answer, or the stream of its chunks.

        Args:
            path: The route, after /v1.
            whole: The type of a whole answer.
            chunk: The type of a chunk.
            extra_body: Further fields of the request's JSON.
            extra_headers: Further headers.
            timeout_s: Seconds of silence after which the request fails.
            fields: The fields of the request's JSON.
        """
        url = self._transport.base_url + path
        body = _without_none(**fields) | dict(extra_body or {})
        if not body.get("stream"):
            return await self._transport.fetch(
                "POST", url, whole, body, headers=extra_headers, timeout_s=timeout_s
            )
        transport = self._transport

        async def reopen(last_id: str) -> ClientResponse:
            return await transport.open(
                "POST",
                url,
                body,
                headers={**(extra_headers or {}), "Last-Event-ID": last_id},
                timeout_s=timeout_s,
                max_retries=MAX_RESUME_TRIES,
            )

        response = await transport.open(
            "POST", url, body, headers=extra_headers, timeout_s=timeout_s
        )
        silence_s = timeout_s or transport.timeout_s
        return Stream(response, chunk, silence_s, reopen if transport.max_retries else None)


class Chat:
    """`client.chat`, which has the completions, as in the openai package."""

    def __init__(self, transport: Transport) -> None:
        self.completions = ChatCompletions(transport)


class ChatCompletions(_Resource):
    """POST /v1/chat/completions."""

    @overload
    async def create(
        self,
        *,
        messages: Sequence[Mapping[str, Any]],
        stream: Literal[False] = False,
        **fields: Any,
    ) -> protocol.ChatCompletion: ...

    @overload
    async def create(
        self, *, messages: Sequence[Mapping[str, Any]], stream: Literal[True], **fields: Any
    ) -> Stream[protocol.ChatCompletionChunk]: ...

    async def create(
        self, *, messages: Sequence[Mapping[str, Any]], stream: bool = False, **fields: Any
    ) -> Any:
        """Return the answer to a conversation, or its stream of chunks.

        `fields` and the entries of `extra_body` are fields of the request's JSON; a field that is
        None is omitted. `model` may be omitted if the server has one. `extra_headers` and
        `timeout_s` are for this request alone.
        """
        return await self._create(
            "/chat/completions",
            whole=protocol.ChatCompletion,
            chunk=protocol.ChatCompletionChunk,
            messages=messages,
            stream=stream or None,
            **fields,
        )


class Completions(_Resource):
    """POST /v1/completions."""

    @overload
    async def create(
        self, *, prompt: Prompt, stream: Literal[False] = False, **fields: Any
    ) -> protocol.Completion: ...

    @overload
    async def create(
        self, *, prompt: Prompt, stream: Literal[True], **fields: Any
    ) -> Stream[protocol.Completion]: ...

    async def create(self, *, prompt: Prompt, stream: bool = False, **fields: Any) -> Any:
        """Return the continuation of a text, a list of token ids, or several of either.

        The other arguments are those of a chat.
        """
        return await self._create(
            "/completions",
            whole=protocol.Completion,
            chunk=protocol.Completion,
            prompt=prompt,
            stream=stream or None,
            **fields,
        )


class Models(_Resource):
    """GET /v1/models."""

    async def list(self) -> protocol.ModelList:
        """Return the models of the server."""
        return await self._transport.fetch(
            "GET", f"{self._transport.base_url}/models", protocol.ModelList
        )

    async def retrieve(self, id: str) -> protocol.ModelCard:
        """Return a model. Raises NotFound."""
        return await self._transport.fetch(
            "GET", f"{self._transport.base_url}/models/{quote(id)}", protocol.ModelCard
        )


class Requests(_Resource):
    """Requests that run on a moeserve server."""

    async def abort(self, id: str) -> protocol.Aborted:
        """End the running request with this request id; its reader gets finish_reason "abort".
        Raises NotFound.
        """
        url = f"{self._transport.base_url}/requests/{quote(id, safe='')}"
        return await self._transport.fetch("DELETE", url, protocol.Aborted, max_retries=0)


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
