"""Receipts over HTTP where there are none; tests/integration/test_receipts.py has some."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.frontend.receipt_signer import NO_KEY, ReceiptSigner

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x", "stream": True})],
)
async def test_a_server_without_a_key_refuses_receipts_and_says_how_to_have_them(live, path, body):
    live.front.receipt_signer = ReceiptSigner("m", Path("/nowhere"), None, None)
    status, answer, _ = await live.post(path, body | {"receipt": True})
    assert status == 400
    assert (answer["error"]["message"], answer["error"]["param"]) == (NO_KEY, "receipt")
    status, answer, _ = await live.post(path, body | {"stream": False, "receipt": False})
    assert status == 200
    assert "receipt" not in answer["choices"][0]
    status, answer = await live.get("/v1/receipt-key")
    assert (status, answer["error"]["message"], answer["error"]["code"]) == (
        404,
        NO_KEY,
        "no_receipts",
    )


async def test_no_tokens_have_no_receipt(live):
    body = {"prompt": "x", "echo": True, "max_tokens": 0, "receipt": True}
    status, answer, _ = await live.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "receipt")
