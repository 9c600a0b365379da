"""Documents, search results and files reach the model as text; what is no text is refused."""

from __future__ import annotations

import base64

import pytest

from tests.server.test_tools import CALLS, answering

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def document(source: dict, **fields) -> dict:
    return {"type": "document", "source": source} | fields


def asked(path: str, part: dict) -> dict:
    """Return a request whose user sends a part and a question."""
    if path == MESSAGES:
        content = [part, {"type": "text", "text": "Well?"}]
        messages = [{"role": "user", "content": content}]
        return {"model": "org/tiny", "max_tokens": 5, "messages": messages}
    content = [part, {"type": "input_text", "text": "Well?"}]
    return {"model": "org/tiny", "input": [{"role": "user", "content": content}]}


FOUND = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
SHOWN = {
    "text": (
        MESSAGES,
        document({"type": "text", "media_type": "text/plain", "data": "A fox."}, title="Tale"),
        "[document: Tale]\nA fox.\nWell?",
    ),
    "context": (
        MESSAGES,
        document({"type": "text", "data": "A fox."}, title="Tale", context="From 1900."),
        "[document: Tale]\nFrom 1900.\nA fox.\nWell?",
    ),
    "base64": (
        MESSAGES,
        document({"type": "base64", "media_type": "text/plain", "data": encoded("Ein Füchslein")}),
        "[document]\nEin Füchslein\nWell?",
    ),
    "content": (
        MESSAGES,
        document({"type": "content", "content": FOUND}, citations={"enabled": False}),
        "[document]\none\ntwo\nWell?",
    ),
    "search result": (
        MESSAGES,
        {"type": "search_result", "title": "Foxes", "source": "https://a.example"}
        | {"content": FOUND},
        "[search result: Foxes]\nhttps://a.example\none\ntwo\nWell?",
    ),
    "file": (
        RESPONSES,
        {"type": "input_file", "filename": "notes.md", "file_data": encoded("# Foxes")},
        "[file: notes.md]\n# Foxes\nWell?",
    ),
    "data URL": (
        RESPONSES,
        {"type": "input_file", "file_data": "data:text/csv;base64," + encoded("a,b")},
        "[file]\na,b\nWell?",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "part", "text"), SHOWN.values(), ids=SHOWN)
async def test_the_model_reads_the_text(path, part, text):
    async with answering(CALLS) as live:
        status, answer, response = await live.post(path, asked(path, part))
        assert (status, response.headers.get("Warning")) == (200, None), answer
        assert f"user\n{text}<|im_end|>" in live.engine.prompt


async def test_documents_in_results_of_tools():
    blocks = [
        document({"type": "text", "data": "A fox."}),
        {"type": "search_result", "title": "Foxes", "source": "local", "content": FOUND[:1]},
    ]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
    turns = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    file = {"type": "input_file", "filename": "a.txt", "file_data": encoded("A fox.")}
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [file]},
    ]
    async with answering(CALLS) as live:
        body = {"model": "org/tiny", "max_tokens": 5, "messages": turns}
        status, answer, _ = await live.post(MESSAGES, body)
        assert status == 200, answer
        assert "[document]\nA fox.\n[search result: Foxes]\nlocal\none<" in live.engine.prompt
        status, answer, _ = await live.post(RESPONSES, {"model": "org/tiny", "input": items})
        assert status == 200, answer
        assert "[file: a.txt]\nA fox.<" in live.engine.prompt


PDF = {"type": "base64", "media_type": "application/pdf", "data": encoded("%PDF")}
REFUSED = [
    (MESSAGES, document(PDF), "application/pdf"),
    (MESSAGES, document({"type": "url", "url": "https://a.example"}), "'url'"),
    (MESSAGES, document({"type": "file", "file_id": "file_1"}), "'file'"),
    (MESSAGES, document({"type": "text"}), "without data"),
    (MESSAGES, document({"type": "content", "content": [{"type": "image"}]}), "of type text"),
    (MESSAGES, document({"type": "base64", "media_type": "text/plain", "data": "?"}), "base64"),
    (MESSAGES, document({"type": "base64", "media_type": "text/plain", "data": "ä"}), "base64"),
    (MESSAGES, document({"type": "text", "data": "a"}, citations={"enabled": True}), "citations"),
    (RESPONSES, {"type": "input_file", "file_url": "https://a.example"}, "file_data"),
    (RESPONSES, {"type": "input_file", "file_id": "file-1"}, "file_data"),
    (RESPONSES, {"type": "input_file", "filename": "a.pdf", "file_data": "JVBERg=="}, "'.pdf'"),
    (
        RESPONSES,
        {"type": "input_file", "file_data": "data:application/pdf;base64,JVBERg=="},
        "application/pdf",
    ),
    (RESPONSES, {"type": "input_file", "filename": "a.txt", "file_data": "/w=="}, "UTF-8"),
    (RESPONSES, {"type": "input_file", "file_data": "data:text/plain,abc"}, "base64"),
]


@pytest.mark.parametrize(("path", "part", "why"), REFUSED)
async def test_other_files_are_refused_by_name(path, part, why):
    async with answering(CALLS) as live:
        status, answer, _ = await live.post(path, asked(path, part))
        assert status == 400
        message = answer["error"]["message"]
        assert why in message
        assert message.startswith(("messages[0].content[0]", "input[0].content[0]"))
        assert "extract the text" in message or "citations" in why or "data URL" in message
