"""tools/try_agents.py with a small program in the place of an agent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from moeserve.cli.agent_setup import Server
from tests.server.conftest import live_server, make_tokenizer
from tools import try_agents
from tools.try_agents import Call, Recorder, Trial, force, try_agent

# Plays shell-gpt: sends its words to the server of its environment.
PROGRAM = f"""#!{sys.executable}
import json, os, sys, urllib.request

if sys.argv[1:] == ["--version"]:
    print("ShellGPT 1.2.3")
    sys.exit()
messages = [{{"role": "user", "content": " ".join(sys.argv[1:])}}]
if "BAD" in sys.argv[1:]:
    messages = "none"
body = {{"model": os.environ["DEFAULT_MODEL"], "messages": messages, "max_tokens": 5}}
request = urllib.request.Request(
    os.environ["API_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {{"Content-Type": "application/json"}},
)
print(urllib.request.urlopen(request).read().decode())
"""


@pytest.mark.parametrize(
    ("body", "forced"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": "SCHEMA"}}],
                "tool_choice": "required",
            },
        ),
        (
            {"tools": [{"type": "web_search"}, {"type": "function", "name": "f"}]},
            {
                "tools": [{"type": "function", "name": "f", "parameters": "SCHEMA"}],
                "tool_choice": "required",
            },
        ),
        (
            {"tools": [{"name": "f", "input_schema": {}}, {"name": "g", "input_schema": {}}]},
            {
                "tools": [{"name": "f", "input_schema": "SCHEMA"}],
                "tool_choice": {"type": "any"},
            },
        ),
    ],
)
def test_a_call_is_forced_in_each_api(body: dict, forced: dict) -> None:
    schema = {
        "type": "object",
        "properties": {"path": {"const": "/x"}},
        "required": ["path"],
        "additionalProperties": False,
    }
    text = repr(forced).replace("'SCHEMA'", repr(schema))
    assert force(body, Call("f", {"path": "/x"}))
    assert repr(body) == text


@pytest.mark.parametrize("body", [{}, {"tools": None}, {"tools": [{"name": "g"}]}])
def test_other_requests_stay(body: dict) -> None:
    before = repr(body)
    assert not force(body, Call("f", {}))
    assert repr(body) == before


@pytest.mark.parametrize(
    ("ask", "row"),
    [
        (["{prompt}"], ["shell-gpt", "1.2.3", "yes", "no", "-"]),
        (["BAD", "{prompt}"], ["shell-gpt", "1.2.3", "no"]),
    ],
)
async def test_the_row_of_an_agent(
    ask: list[str], row: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sgpt"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(try_agents.TRIALS, "sgpt", Trial(ask))
    async with live_server(make_tokenizer()) as live:
        recorder = Recorder(live.url)
        async with recorder.listening() as url:
            server = Server(url, "none", "org/tiny", live.engine.context)
            found = await try_agent("sgpt", server, recorder, tmp_path)
    assert found[: len(row)] == row
    (exchange,) = recorder.exchanges
    assert exchange.path == "/v1/chat/completions"
    assert exchange.status == (200 if "yes" in row else 400)
    assert exchange.prompt_tokens > 0 or "no" in row[2]
    assert try_agents.HELLO in (tmp_path / "sgpt.log").read_text()
