"""Ollama's routes about models, used by PyPI's `ollama` as it comes, and paths that are missing."""

from __future__ import annotations

import ollama
import pytest

from moeserve.loader.model_dir import resolve_model_dir
from tests.server.test_ollama import ASK, CHAT, MODEL, USER
from tests.server.test_tools import CALLS, answering


async def test_names_may_have_the_default_tag(ollama_client, live):
    name = f"{MODEL}:latest"
    assert (await ollama_client.chat(name, [USER])).model == name
    assert (await ollama_client.show(name)).capabilities == ["completion", "insert"]
    for path, body in (
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        assert (await live.post(path, {"model": name} | body))[0] == 200
    assert (await live.post(CHAT, ASK | {"model": f"{MODEL}:7b"}))[0] == 404


async def test_the_model_is_listed_and_loaded(ollama_client, live):
    live.front.model_names = (MODEL, "alias")
    (listed, alias) = (await ollama_client.list()).models
    assert (listed.model, alias.model) == (MODEL, "alias")
    assert listed.digest == alias.digest
    assert len(listed.digest) == 64
    (loaded, _) = (await ollama_client.ps()).models
    ready = live.front.ready
    assert (loaded.model, loaded.size, loaded.size_vram) == (MODEL, ready.weight_bytes, 0)
    assert loaded.context_length == ready.max_model_len
    assert loaded.expires_at.year > 2300
    assert loaded.digest == listed.digest
    version = (await live.get("/api/version"))[1]["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]  # which VS Code asks for


async def test_a_description_comes_from_the_models_files(ollama_client, live, monkeypatch):
    monkeypatch.setattr(live.front, "model_dir", resolve_model_dir("demo"))
    live.front.defaults = {"temperature": 0.25, "repetition_penalty": 1.5}
    shown = await ollama_client.show(MODEL)
    details = shown.details
    assert (details.format, details.family) == ("safetensors", "qwen3_moe")
    assert (details.parameter_size, details.quantization_level) == ("10", "BF16")
    info = shown.modelinfo
    assert info["general.architecture"] == "qwen3_moe"
    assert info["general.basename"] == MODEL
    assert info["qwen3_moe.context_length"] == live.front.ready.max_model_len
    assert info["qwen3_moe.embedding_length"] == 256
    assert (info["qwen3_moe.expert_count"], info["qwen3_moe.expert_used_count"]) == (8, 2)
    lines = [line.split() for line in shown.parameters.splitlines()]
    assert lines == [["num_ctx", "256"], ["temperature", "0.25"], ["repeat_penalty", "1.5"]]
    assert "<|im_start|>" in shown.template
    (listed,) = (await ollama_client.list()).models
    assert listed.size == sum(
        path.stat().st_size for path in resolve_model_dir("demo").glob("*.safetensors")
    )
    asked = {"name": MODEL, "model": "", "system": "", "options": None, "verbose": True}
    status, answer, response = await live.post("/api/show", asked)
    assert (status, answer["details"]["context_length"]) == (200, 256)
    assert response.headers["Warning"] == '299 moeserve "no effect here: verbose"'


async def test_capabilities_are_those_of_template_and_format():
    async with answering(CALLS) as live, ollama.AsyncClient(host=live.url) as ollama_client:
        live.front.tokenizer.fim = None
        assert (await ollama_client.show(MODEL)).capabilities == ["completion", "tools", "thinking"]
        _, listed = await live.get("/api/v0/models")
        assert listed["data"][0]["capabilities"] == ["tool_use"]


@pytest.mark.parametrize(
    "path", ["pull", "push", "create", "copy", "delete", "embed", "embeddings"]
)
async def test_what_there_is_not_says_why(live, path):
    for method in ("POST", "DELETE"):
        async with live.session.request(method, f"{live.url}/api/{path}", json={}) as response:
            answer = await response.json()
        assert response.status == 404
        assert answer["error"].startswith(f"/api/{path}: this ")


async def test_the_client_gets_the_reason(ollama_client):
    with pytest.raises(ollama.ResponseError, match="one model") as failed:
        await ollama_client.pull("llama3.2")
    assert failed.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="embeddings are not supported"):
        await ollama_client.embed(MODEL, "a")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/api/chat", "/api/chat"),
        ("//api/tags", "/api/tags"),
        ("/api/api/show", "/api/show"),
        ("/api/chat/", "/api/chat"),
        ("/api/chat/completions", "/v1/chat/completions"),
        ("/api/v1/models", "/v1/models"),
        ("/v1/api/v0/models", "/api/v0/models"),
    ],
)
async def test_a_wrong_base_is_explained(live, path, meant):
    status, answer = await live.get(path)
    error = answer["error"]
    text = error if isinstance(error, str) else error["message"]
    assert (status, f"did you mean {meant}?" in text) == (404, True), text
