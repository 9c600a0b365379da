"""No value of a request reaches a log line at the default level, however the request ends."""

from __future__ import annotations

import asyncio
import logging

import pytest

from moeserve.server import status
from moeserve.server.access_log import AccessLog
from moeserve.server.chat_request import ChatRequest
from moeserve.server.dialects.completions import CompletionRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SECRET = "s3cret"


@pytest.fixture
def lines(caplog):
    """The log so far, as the server's default level has it."""
    caplog.set_level(logging.INFO)
    return lambda: [logging.Formatter("%(message)s").format(record) for record in caplog.records]


async def test_whatever_is_asked(launch, lines, tmp_path):
    forged = f"{SECRET}\nERROR forged \x1b[31m"
    log = tmp_path / "access.jsonl"
    async with launch(observers=[AccessLog(str(log))], api_key=(f"key-{SECRET}",)) as live:
        key = {"X_Api_Key": f"key-{SECRET}"}
        for path, kind in ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest)):
            base = (
                {"messages": [{"role": "user", "content": SECRET}]}
                if path == CHAT
                else {"prompt": SECRET}
            )
            base["max_tokens"] = 1
            for name in [*kind.__struct_fields__, forged]:
                for value in (forged, [forged], {forged: forged}):
                    await live.post(path, base | {name: value}, **key)
        for body in (forged.encode(), b'{"a": "' + SECRET.encode(), b"[]"):
            await live.post(CHAT, body, **key)
        await live.post(CHAT, {}, X_Api_Key=f"wrong-{SECRET}")
        for path in (
            f"/{SECRET}",
            f"/v1/models/{SECRET}",
            f"/v1/experts?{SECRET}={SECRET}",
            f"/livez?{SECRET}",
        ):
            await live.get(path, **{"X-Api-Key": f"key-{SECRET}", "User-Agent": SECRET})
        await live.raw(f"GET /{SECRET} HTTP/9.9\r\n{SECRET}\r\n\r\n".encode())
        await asyncio.sleep(0)
    found = lines() + log.read_text().splitlines()
    assert len(found) > 200
    assert not [line for line in found if SECRET in line or "\n" in line or "\x1b" in line]


async def test_a_bug_is_logged_by_its_place(live, lines, monkeypatch):
    def breaks(call: object, name: str) -> None:
        raise KeyError(SECRET)

    monkeypatch.setattr(status, "_card", breaks)
    answer = await live.get("/v1/models", **{"X-Request-Id": "r1"})
    _ = None
    assert answer[0] == 500
    (line,) = lines()
    assert line.startswith("request r1 failed: KeyError < test_logs.py:")
    assert "list_models" in line
    assert SECRET not in line


async def test_an_engines_error_is_logged_without_what_an_exception_said(live, lines):
    live.engine.break_after = 0
    live.engine.why = f"logits processor failed: ValueError: {SECRET}"
    status_code, body, _ = await live.post(
        CHAT, {"messages": [{"role": "user", "content": "a"}]}, X_Request_Id="r2"
    )
    assert status_code == 500
    assert SECRET not in str(body)
    assert lines() == ["request r2 failed: logits processor failed: ValueError"]


async def test_constraints_that_exclude_each_other_are_the_clients_fault(live, lines):
    live.engine.break_after = 0
    live.engine.why = "no token is left to choose: grammar and allowed_token_ids"
    status_code, body, _ = await live.post(CHAT, {"messages": [{"role": "user", "content": "a"}]})
    assert (status_code, body["error"]["code"]) == (400, "constraint_failed")
    assert lines() == []
