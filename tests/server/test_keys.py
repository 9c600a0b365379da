"""Key files: names, digests, rates and priorities, and new ones while the server runs."""

from __future__ import annotations

import hashlib
import os

import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, RateLimited, Unauthorized
from moeserve.server.auth import Auth, Rates
from moeserve.server.errors import error_response
from moeserve.server.reload import Reloads

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


def auth_of(path, text: str) -> Auth:
    path.write_text(text)
    return Auth(ServerConfig(api_key_file=str(path)))


def test_names_digests_and_lines(tmp_path):
    digest = hashlib.sha256(b"b").hexdigest()
    auth = auth_of(
        tmp_path / "keys.yaml",
        f"keys:\n- {{name: alice, key: a}}\n- {{name: bob, sha256: {digest}, priority: 5}}\n",
    )
    assert [auth.check({"X-Api-Key": key}).name for key in "ab"] == ["alice", "bob"]
    assert auth.check({"X-Api-Key": "b"}).priority == 5
    auth = auth_of(tmp_path / "keys.json", '{"keys": [{"name": "alice", "key": "a"}]}')
    assert auth.check({"Authorization": "Bearer a"}).name == "alice"
    auth = auth_of(tmp_path / "keys", f"a\nsha256:{digest}\n")
    assert auth.check({"X-Api-Key": "b"}).name == digest[:16]
    for wrong in (digest, f"sha256:{digest}"):
        with pytest.raises(Unauthorized):
            auth.check({"X-Api-Key": wrong})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys: [", "not valid YAML"),
        ("[]", "object"),
        ("keys: []", "keys"),
        ("keys: [{name: x}]", "exactly one"),
        ("keys: [{key: s3cret, sha256: " + "a" * 64 + "}]", "exactly one"),
        ("keys: [{key: s3cret}, {key: s3cret}]", "keys 1 and 2 are the same"),
        ("keys: [{key: s3cret, rate: 1}]", "rate"),
        ("keys: [{key: s3cret, tokens_per_minute: 0}]", "tokens_per_minute"),
        ("keys: [{sha256: abc}]", "sha256"),
        ("keys: [{key: s3cret, name: a/b}]", "name"),
        ('keys: [{key: "s3cret}]', "not valid YAML"),
    ],
)
def test_bad_key_files_are_explained_without_showing_keys(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        auth_of(tmp_path / "keys.yaml", text)
    assert "--api-key-file" in str(caught.value)
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)


async def test_the_next_request_is_too_many(launch, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys: [{name: a, key: a, requests_per_minute: 2, tokens_per_minute: 100}, {key: b}]"
    )
    async with launch(api_key_file=str(path)) as live:
        for left in ("1", "0"):
            status, body, response = await live.post(CHAT, ASK, X_Api_Key="a")
            assert status == 200
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == left
            assert response.headers["x-ratelimit-reset-requests"].endswith("s")
        used = 2 * body["usage"]["total_tokens"]
        # some may have come back meanwhile
        assert 0 <= used - (100 - int(response.headers["x-ratelimit-remaining-tokens"])) <= 20
        status, body, response = await live.post(CHAT, ASK, X_Api_Key="a")
        assert (status, body["error"]["type"], body["error"]["code"]) == (
            429,
            "requests",
            "rate_limit_exceeded",
        )
        assert 15 <= int(response.headers["Retry-After"]) <= 46
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        status, _, response = await live.post(CHAT, ASK, X_Api_Key="b")
        assert status == 200
        assert not [name for name in response.headers if name.lower().startswith("x-ratelimit")]


def test_answers_are_paid_for_afterwards(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("moeserve.server.auth.monotonic", lambda: now[0])
    mine = Rates(None, 600)
    for bucket in mine._buckets.values():
        bucket._refilled_at_s = 0.0
    mine.charge_prompt(100)
    mine.charge_answer(700)  # 200 below zero
    assert mine.headers()["X-RateLimit-Remaining-Tokens"] == "0"
    assert mine.headers()["X-RateLimit-Reset-Tokens"] == "1m20s"
    with pytest.raises(RateLimited) as caught:
        mine.charge_prompt(100)
    assert caught.value.retry_after_s == pytest.approx(30)
    assert caught.value.type == "tokens"
    now[0] = 30.0
    mine.charge_prompt(100)
    with pytest.raises(RateLimited, match="601 tokens") as caught:
        mine.charge_prompt(601)
    headers = error_response(caught.value, "id").headers
    assert headers["X-Should-Retry"] == "false"
    assert "Retry-After" not in headers


async def test_a_keys_requests_wait_in_its_place(launch, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{key: low, priority: 5}, {key: any}]")
    async with launch(api_key_file=str(path)) as live:
        for key, asked, given in (
            ("low", None, 5),
            ("low", -9, 5),
            ("low", 7, 7),
            ("any", None, 0),
            ("any", -9, -9),
        ):
            await live.post(CHAT, ASK | {"priority": asked}, X_Api_Key=key)
            assert live.engine.told[-1].priority == given


async def test_keys_change_without_a_restart(tmp_path, caplog):
    path = tmp_path / "keys.yaml"
    auth = auth_of(path, "keys: [{key: a, requests_per_minute: 1}]")
    reloads = Reloads()
    reloads.add(auth.paths, auth.read, auth.use)
    auth.check({"X-Api-Key": "a"}).rate_limits.charge_prompt(1)
    os.utime(path, ns=(1, 1))
    path.write_text("keys: [{key: a, requests_per_minute: 1}, {key: b}]")
    await reloads.check()
    assert auth.check({"X-Api-Key": "b"}).owner
    with pytest.raises(RateLimited):  # what was used stays used
        auth.check({"X-Api-Key": "a"}).rate_limits.charge_prompt(1)
    path.write_text("keys: [")
    await reloads.check(force=True)
    assert "not reloaded" in caplog.text
    assert auth.check({"X-Api-Key": "b"}).owner
    path.unlink()
    await reloads.check()
    assert auth.check({"X-Api-Key": "b"}).owner


@pytest.mark.parametrize("name", ["keys", "keys.yaml", "keys.json"])
def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path, name):
    text = {"keys": "a\nb\n", "keys.yaml": "keys: [{key: a}, {key: b}]"}
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.get(name, '{"keys": [{"key": "a"}]}').encode())
    assert Auth(ServerConfig(api_key_file=str(path))).check({"X-Api-Key": "a"}).owner


def test_a_right_key_in_either_header_is_enough(tmp_path):
    auth = auth_of(tmp_path / "keys.yaml", "keys: [{name: a, key: a}, {name: b, key: b}]")
    for bearer, key, name in (
        ("Bearer wrong", "a", "a"),
        ("Bearer a", "wrong", "a"),
        ("Bearer b", "a", "b"),
        ("Bearer ", "a", "a"),
        ("Bearer", "a", "a"),
        ("Basic a", "b", "b"),
        ("bearer  a ", "", "a"),
    ):
        assert auth.check({"Authorization": bearer, "X-Api-Key": key}).name == name
    for bearer, key in (("Bearer wrong", "wrong"), ("Bearer ", ""), ("Basic a", "")):
        with pytest.raises(Unauthorized):
            auth.check({"Authorization": bearer, "X-Api-Key": key})
