"""LM Studio's routes."""

from __future__ import annotations

from moeserve.loader.model_dir import resolve_model_dir
from tests.server.test_ollama import MODEL, USER
from tests.server.test_tools import CALLS, answering


async def test_lm_studios_list(live, monkeypatch):
    monkeypatch.setattr(live.front, "model_dir", resolve_model_dir("demo"))
    _, listed = await live.get("/api/v0/models")
    expected = {
        "id": MODEL,
        "object": "model",
        "type": "llm",
        "publisher": "org",
        "arch": "qwen3_moe",
        "compatibility_type": "mlx",
        "quantization": "BF16",
        "state": "loaded",
        "max_context_length": 256,
        "loaded_context_length": 256,
        "capabilities": [],
    }
    assert listed == {"object": "list", "data": [expected]}
    assert await live.get(f"/api/v0/models/{MODEL}") == (200, expected)
    for name, status in (("other", 404), ("", 404)):
        got, answer = await live.get(f"/api/v0/models/{name}")
        assert (got, answer["error"]["code"]) == (status, "model_not_found")


async def test_lm_studios_routes_answer_as_openais(live, story):
    chat = "/api/v0/chat/completions"
    _, answer, _ = await live.post(chat, {"messages": [USER], "max_tokens": -1})
    assert answer["choices"][0]["message"]["content"] == story
    chunks = await live.events(chat, {"messages": [USER]})
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == story
    _, answer, _ = await live.post("/api/v0/completions", {"prompt": "a", "max_tokens": 50})
    assert answer["choices"][0]["text"]
    status, answer, _ = await live.post(chat, {"messages": []})
    assert (status, answer["error"]["param"]) == (400, "messages")


async def test_lm_studios_name_of_reasoning():
    async with answering(CALLS) as live:
        chat = "/api/v0/chat/completions"
        _, answer, _ = await live.post(chat, {"messages": [USER]})
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"].strip() == "A fox 😀?"
        assert "reasoning" not in message
        deltas = [
            chunk["choices"][0]["delta"] for chunk in await live.events(chat, {"messages": [USER]})
        ]
        streamed = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert streamed == message["reasoning_content"]
        assert not any("reasoning" in delta for delta in deltas)
