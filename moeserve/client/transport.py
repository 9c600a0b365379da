"""HTTP with retries: a request becomes an answer, an open response, or an error with the reason."""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import ClientResponse, ClientSession, ClientTimeout

from moeserve.client.faults import delay_s, request_error, should_retry
from moeserve.errors import Unreachable
from moeserve.protocol import Answer
from moeserve.version import __version__

T = TypeVar("T", bound=Answer)
_CONNECTION_ERRORS = (aiohttp.ClientError, OSError)  # TimeoutError is an OSError


class Transport:
    """A pool of connections to one server."""

    def __init__(
        self, base_url: str, api_key: str | None, timeout_s: float, max_retries: int
    ) -> None:
        self.base_url = base_url.rstrip("/")
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, got {base_url!r}")
        self.root_url = self.base_url.removesuffix("/v1")
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._headers = {"User-Agent": f"moeserve/{__version__}"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: ClientSession | None = None

    def session(self) -> ClientSession:
        """Return aiohttp's session. It belongs to the running loop, so its first use makes it."""
        if self._session is None:
            # The server bounds concurrency, not a hidden queue here.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = ClientSession(
                connector=connector, headers=self._headers, auto_decompress=True
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def open(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_retries: int | None = None,
    ) -> ClientResponse:
        """Return a successful response whose body has not been read yet. Retries happen here.

        timeout_s bounds the silence between two reads, not the whole answer. Raises RequestError.
        """
        data = None if body is None else msgspec.json.encode(body)
        request_headers = {
            **(headers or {}),
            **({"Content-Type": "application/json"} if data is not None else {}),
        }
        silence_s = self.timeout_s if timeout_s is None else timeout_s
        timeout = ClientTimeout(total=None, sock_connect=min(30.0, silence_s), sock_read=silence_s)
        num_retries = self.max_retries if max_retries is None else max_retries
        attempt = 0
        while True:
            response_headers: Mapping[str, str] = {}
            try:
                response = await self.session().request(
                    method,
                    url,
                    data=data,
                    headers=request_headers,
                    timeout=timeout,
                    allow_redirects=False,
                )
                if 200 <= response.status < 300:
                    return response
                response_headers = response.headers
                status = response.status
                async with response:
                    fault: Exception = request_error(
                        status, await response.read(), response_headers
                    )
                may_retry = should_retry(status, response_headers)
            except _CONNECTION_ERRORS as error:
                fault = unreachable(url, error, silence_s)
                may_retry = True
            if not may_retry or attempt >= num_retries:
                raise fault
            await asyncio.sleep(delay_s(attempt, response_headers))
            attempt += 1

    async def fetch(
        self, method: str, url: str, kind: type[T], body: Any = None, **options: Any
    ) -> T:
        """Return one whole answer, decoded."""
        content, headers = await self.read(method, url, body, **options)
        try:
            answer = msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise Unreachable(
                f"the server's answer is not a {kind.__name__}: {error}", code="bad_answer"
            ) from error
        answer.request_id = headers.get("x-request-id")
        return answer

    async def read(
        self, method: str, url: str, body: Any = None, **options: Any
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return one whole answer as bytes, with its headers."""
        async with await self.open(method, url, body, **options) as response:
            try:
                return await response.read(), response.headers
            except _CONNECTION_ERRORS as error:
                raise unreachable(url, error, self.timeout_s) from error


def unreachable(url: str, error: BaseException, silence_s: float) -> Unreachable:
    """Return the error for a connection that broke, was refused or was silent."""
    if isinstance(error, TimeoutError):
        return Unreachable(f"{url}: no byte for {silence_s:g} s", code="timeout")
    if isinstance(error, aiohttp.ClientConnectorError):
        return Unreachable(
            f"cannot connect to {url}: {error.os_error}; is the server running there?"
        )
    return Unreachable(f"{url}: the connection broke: {error or type(error).__name__}")
