"""A small OpenAI-compatible server on a thread, which echoes its prompts word by word."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from aiohttp import web


class FakeOpenAI:
    """Answers with the words of the prompt, one per chunk.

    A prompt with the word FAIL gets status 400; one with SLOW never ends.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.running = self.most_running = 0
        self.vanished = threading.Event()
        self.refuse_after: int | None = None  # break connections after this many answers
        self.has_tokenizer = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.root = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        self.url = f"{self.root}/v1"

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/readyz", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port: int = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return f"http://127.0.0.1:{port}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "org/fake"}]})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        if not self.has_tokenizer:
            return web.json_response({"error": {"message": "no tokenizer here"}}, status=400)
        words = (await request.json())["prompt"].split()
        return web.json_response({"tokens": [len(w) for w in words], "count": len(words)})

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"prompt": " ".join("x" * i for i in (await request.json())["tokens"])}
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        words = body["messages"][-1]["content"].split()
        return await self._answer(request, body, words, "message", "delta")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        words = prompt.split() if isinstance(prompt, str) else [str(i) for i in prompt]
        return await self._answer(request, body, words, "text", "text")

    async def _answer(
        self, request: web.Request, body: Any, words: list[str], whole: str, piece: str
    ) -> web.StreamResponse:
        self.seen.append((request.path, body))
        if self.refuse_after is not None and len(self.seen) > self.refuse_after:
            assert request.transport is not None
            request.transport.close()
        if "FAIL" in words:
            return web.json_response(
                {"error": {"message": "told to fail", "code": "invalid_value"}}, status=400
            )
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            limit = body.get("max_tokens") or body.get("max_completion_tokens") or len(words)
            reason = "length" if limit < len(words) or whole == "text" else "stop"
            words = words[:limit]
            usage = {
                "prompt_tokens": 2,
                "completion_tokens": len(words),
                "total_tokens": 2 + len(words),
            }
            if not body.get("stream"):
                text: Any = " ".join(words)
                choice = {"index": 0, whole: {"content": text} if whole == "message" else text}
                return web.json_response(
                    {"id": "x", "choices": [choice], "usage": usage}, headers={"X-Request-Id": "r"}
                )
            return await self._stream(request, words, piece, usage, reason)
        except (asyncio.CancelledError, ConnectionError):
            self.vanished.set()
            raise
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, words: list[str], piece: str, usage: Any, reason: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(body: Any) -> None:
            await response.write(f"data: {json.dumps(body)}\n\n".encode())

        if piece == "delta":
            await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i, word in enumerate(words):
            text = word if i == 0 else " " + word
            inside: Any = {"content": text} if piece == "delta" else text
            last = reason if i == len(words) - 1 else None
            await send({"choices": [{"index": 0, piece: inside, "finish_reason": last}]})
            if word == "SLOW":
                await asyncio.Event().wait()
        await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response
