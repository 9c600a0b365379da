"""Host and Origin: web pages of others cannot use an open server through a visitor's browser."""

from __future__ import annotations

import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.server.hosts import Hosts, is_loopback

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
OURS = ("localhost", "LOCALHOST:8000", "a.localhost", "127.0.0.1", "127.8.9.1:80", "[::1]:8000")
OTHERS = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example")


async def status_of(live, target: str, host: str, *lines: str) -> int:
    head = "\r\n".join([f"GET {target} HTTP/1.1", f"Host: {host}", *lines, "Connection: close"])
    return int((await live.raw(f"{head}\r\n\r\n".encode())).split()[1])


async def test_an_open_server_on_this_machine_answers_to_its_names_only(live):
    for host in (*OURS, "localhost.", ""):
        assert await status_of(live, "/v1/models", host) == 200, host
    for host in (*OTHERS, "192.0.2.1", "[2001:db8::1]", "localhost@evil.example"):
        for path in ("/v1/models", "/", "/metrics", "/livez", "/nothing"):
            assert await status_of(live, path, host) == 403, host
    status, answer, _ = await live.post(CHAT, ASK, Host="evil.example")
    assert (status, answer["error"]["code"]) == (403, "host_not_allowed")
    assert "'evil.example'" in answer["error"]["message"]
    assert "allowed_hosts" in answer["error"]["message"]
    # the host of a target in absolute form counts, not the header beside it
    assert await status_of(live, "http://evil.example/livez", "localhost") == 403
    assert await status_of(live, "http://localhost/livez", "evil.example") == 200


async def test_more_hosts_are_listed(launch):
    async with launch(allowed_hosts=("box.example", "192.0.2.1")) as live:
        for host in (*OURS, "Box.Example:8000", "192.0.2.1"):
            assert await status_of(live, "/v1/models", host) == 200
        for host in OTHERS:
            assert await status_of(live, "/v1/models", host) == 403
    async with launch(allowed_hosts=("*",)) as live:
        assert await status_of(live, "/v1/models", "evil.example") == 200


async def test_a_key_protects_as_well(launch):
    async with launch(api_key=("right",)) as live:
        assert await status_of(live, "/v1/models", "any.example", "X-Api-Key: right") == 200
        assert await status_of(live, "/v1/models", "any.example") == 401
    async with launch(api_key=("right",), allowed_hosts=("box.example",)) as live:
        assert await status_of(live, "/v1/models", "any.example", "X-Api-Key: right") == 403


def test_other_addresses_have_names_that_are_not_known_here():
    for host in ("0.0.0.0", "::", "192.0.2.1", "box.example"):
        assert not is_loopback(host)
        assert not Hosts(ServerConfig(host=host))._is_local
    for host in OURS:
        if ":" not in host or host.startswith("["):
            assert is_loopback(host.removesuffix(":8000")), host


@pytest.mark.parametrize("host", ["http://box.example", "box.example:80", "a/b", "", "*.example"])
def test_hosts_that_no_client_sends_are_refused(host):
    with pytest.raises(ConfigError, match="allowed_hosts"):
        Hosts(ServerConfig(allowed_hosts=(host,)))


FORM = (
    b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n--B--\r\n'
)


async def test_pages_of_others_upload_no_files(launch, tmp_path):
    """A browser sends a form to another origin without asking first."""
    page = "https://page.example"
    for settings, key, origin, status in (
        ({}, "", None, 200),
        ({}, "", "{url}", 200),
        ({}, "", page, 403),
        ({}, "", "null", 403),
        ({"allowed_origins": (page,)}, "", page, 200),
        ({"allowed_origins": ("*",)}, "", page, 200),
        ({"api_key": ("right",)}, "right", page, 200),  # it was told the key
    ):
        async with launch(files_dir=str(tmp_path / "files"), **settings) as live:
            headers = {"Content-Type": "multipart/form-data; boundary=B", "X-Api-Key": key}
            if origin is not None:
                headers["Origin"] = origin.format(url=live.url)
            url = f"{live.url}/v1/files"
            async with live.session.post(url, data=FORM, headers=headers) as response:
                assert response.status == status, (settings, origin, await response.text())
