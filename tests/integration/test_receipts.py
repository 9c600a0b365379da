"""Receipts of a server with four ranks, one of which is killed, verified by a single rank."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from moeserve.cli import main
from moeserve.frontend.signing_key import make_key

from .conftest import running_server
from .test_expert_parallel import engines
from .test_faults import until

CHAT = {
    "messages": [{"role": "user", "content": "A story!"}],
    "n": 2,
    "seed": 1,
    "max_tokens": 90,
    "receipt": True,
}


async def streamed(session: aiohttp.ClientSession, url: str, number: int, seen: list[int]) -> dict:
    """The receipt of a stream; `seen` grows with it."""
    body = {
        "prompt": f"{number} foxes",
        "temperature": 0.8,
        "max_tokens": 130,
        "ignore_eos": True,
        "receipt": True,
    }
    async with session.post(
        url + "/v1/completions", json=body | {"stream": True, "speculate": number % 2 == 0}
    ) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                seen.append(len(choice["text"]))
    return choice["receipt"]


async def test_ranks_micro_batches_drafts_and_a_loss_change_no_receipt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    public = make_key(key)
    (tmp_path / "settings.yaml").write_text(f"server: {{receipt_key: {key}}}")
    flags = (
        "--dp",
        "2",
        "--tp",
        "2",
        "--dbo",
        "on",
        "--speculate",
        "mtp:2",
        "--max-model-len",
        "512",
    )
    with running_server(
        tmp_path / "log", *flags, "--config", str(tmp_path / "settings.yaml")
    ) as server:
        assert json.loads(server.get("/v1/receipt-key")[1])["public_key"] == public
        async with aiohttp.ClientSession() as session:
            seen: list[list[int]] = [[] for _ in range(6)]
            streams = [
                asyncio.create_task(streamed(session, server.url, i, s)) for i, s in enumerate(seen)
            ]
            await until(lambda: all(len(s) > 10 for s in seen))
            assert not any(stream.done() for stream in streams)
            engines(server)[1].kill()
            found = await asyncio.gather(*streams)
            async with session.post(server.url + "/v1/chat/completions", json=CHAT) as answer:
                found += [choice["receipt"] for choice in (await answer.json())["choices"]]
    (tmp_path / "receipts").write_text(json.dumps(found))
    words = ["verify", str(tmp_path / "receipts"), "--model", "demo", "--key", public]
    code = await asyncio.to_thread(main.main, words)
    said = capsys.readouterr().out.splitlines()
    assert (code, len(said), said[-1]) == (0, len(found) + 1, "equal"), said
    assert sum("and their logits are equal" in line for line in said) == 8
