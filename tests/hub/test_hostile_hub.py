"""Hubs, networks and repositories that mislead: what is refused or kept, and who gets the token."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import threading
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from moeserve.config import config_of
from moeserve.errors import CheckpointError
from moeserve.hub import download, listing, transfer
from moeserve.hub.cache import CachedRepo
from moeserve.hub.progress import Progress
from moeserve.models.fetch import local_config
from tests.hub.test_download import GGUF, demo_files, entry, get, weights
from tests.hub_server import TOKEN, Hub, Repo, digest_of

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.001)


def refusal(text: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        get(text)
    message = str(caught.value)
    assert message.isprintable()  # one line
    return message


def keys_of(hub: Hub, host: str) -> set[str | None]:
    return {each.headers.get("Authorization") for each in hub.requests if each.host == host}


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "javascript:1", "http://[bad/x",
     "http://a..b/x", "http://127.0.0.1:99999/x"],
)  # fmt: skip
@pytest.mark.parametrize("key", ["", TOKEN])
def test_what_is_no_address_of_the_web_is_not_followed(
    location: str, key: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", key)
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    hub.location = location
    assert f"to {location!r}, which is no address of the web" in refusal("o/n")
    assert len(hub.downloads()) == 1


def test_redirects_without_end(hub: Hub) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    hub.location = f"/o/n/resolve/main/{GGUF}"
    assert "is redirected more than 10 times by http" in refusal("o/n")


def test_the_token_follows_no_redirect_or_page_of_a_listing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repos["o/n"] = Repo({GGUF: b"[]"})
    elsewhere = f"{hub.cdn_url}/o/n/{GGUF}"
    hub.next_page = elsewhere
    get("o/n")  # the next page is empty
    hub.next_page = ""
    hub.moved_to = elsewhere
    assert "did not answer as a hub does" in refusal("o/n@refs/pr/1")
    assert keys_of(hub, "cdn") == {None}
    assert keys_of(hub, "hub") == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("key", ["", TOKEN])
def test_passwords_of_netrc_are_not_sent(
    key: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HF_TOKEN", key)
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    get("o/n")
    assert keys_of(hub, "cdn") == {None}
    assert keys_of(hub, "hub") == {f"Bearer {key}" if key else None}


def test_a_password_in_the_address_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("//", "//me:secret@"))
    message = refusal("o/n")
    assert "HF_ENDPOINT has a user's name or password before '127.0.0.1'; remove it" in message
    assert "secret" not in message
    assert not hub.requests


def test_a_token_file_that_cannot_be_read(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))
    assert "the token of `hf auth login` cannot be read" in refusal("o/n")


@pytest.mark.parametrize(
    ("variables", "address", "expected"),
    [
        ({}, "https://a.b/x", None),
        ({"https_proxy": "http://p:1"}, "https://a.b/x", "http://p:1"),
        ({"https_proxy": "p:1"}, "https://a.b/x", "http://p:1"),
        ({"https_proxy": "http://p:1"}, "http://a.b/x", None),
        ({"all_proxy": "http://p:1"}, "http://a.b/x", "http://p:1"),
        ({"https_proxy": "http://p:1", "no_proxy": "c,.b"}, "https://a.b/x", None),
        ({"https_proxy": "http://p:1", "no_proxy": "a.b:8"}, "https://a.b:8/x", None),
        ({"https_proxy": "http://p:1", "no_proxy": "a.b:8"}, "https://a.b/x", "http://p:1"),
        ({"https_proxy": "http://p:1", "no_proxy": "*"}, "https://a.b/x", None),
    ],
)
def test_the_proxy_of_an_address(
    variables: dict[str, str], address: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_proxies(monkeypatch, variables)
    found = transfer.proxy_for(URL(address))
    assert found == (None if expected is None else URL(expected))


@pytest.mark.parametrize("proxy", ["socks5://me:secret@p:1", "http://[bad", "http://p:99999"])
def test_a_proxy_that_is_not_supported(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_proxies(monkeypatch, {"https_proxy": proxy})
    with pytest.raises(CheckpointError, match=r"set HTTPS_PROXY, or NO_PROXY=a\.b") as caught:
        transfer.proxy_for(URL("https://a.b/x"))
    assert "secret" not in str(caught.value)


def set_proxies(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "name", ["o/n.git", "o/a--b", "o/-n", "o/n.", "o/\u540d", "o/" + "n" * 120]
)
def test_a_name_that_no_hub_can_have_is_not_blamed_on_the_network(name: str, hub: Hub) -> None:
    message = refusal(name)
    assert message.startswith(
        f"there is no directory {name!r}, and no hub has a model of that name"
    )
    assert message.endswith("; check the spelling")
    assert not hub.requests


@pytest.mark.parametrize(
    "listed",
    [
        entry(path="a\nb.gguf"),
        entry(path="a\x1b[31m.gguf"),
        entry(path="\ud800.gguf"),
        entry(lfs={"oid": "a" * 64, "size": 10**400, "pointerSize": 1}),
        entry(lfs={"oid": "a" * 64, "size": True, "pointerSize": 1}),
        entry(lfs={"oid": "a" * 64, "size": 4.5, "pointerSize": 1}),
        entry(lfs=None, size=None),
    ],
)
def test_files_that_cannot_be(listed: dict[str, object], hub: Hub) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    hub.listed = [listed]
    assert refusal("o/n").endswith("which cannot be; nothing was downloaded")


@pytest.mark.parametrize("listed", ["x", ["x"], {"a": 1}, [{"type": "file"}], [entry(lfs=[])], 1])
def test_an_answer_that_is_no_listing(listed: Any, hub: Hub) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    hub.listed = listed
    message = refusal("o/n")
    assert message.startswith(f"{hub.url} did not answer as a hub does (")
    assert message.endswith(
        "check HF_ENDPOINT, whether this network needs a login, and HTTPS_PROXY"
    )


def test_a_listing_without_end(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_FILES", 3)
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    hub.next_page = "?again=1"
    assert "o/n has more than 3 files" in refusal("o/n")
    assert not hub.downloads()


def test_the_page_of_a_login_does_not_cost_what_is_here(hub: Hub) -> None:
    data = weights(2**20)
    hub.repos["o/n"] = Repo({GGUF: data})
    blobs = CachedRepo.named("o/n").blobs
    blobs.mkdir(parents=True)
    part = blobs / f"{digest_of(GGUF, data)}.incomplete"
    part.write_bytes(data[: 2**19])
    hub.pages = [b"<html>"] * transfer.MAX_ATTEMPTS
    message = refusal("o/n")
    assert (
        "127.0.0.1 answered with 6 bytes of type text/html, not with the 1048580 bytes" in message
    )
    assert "512.0 KiB of 1.0 MiB are kept" in message
    assert part.read_bytes() == data[: 2**19]
    hub.pages = [b"<html>"]
    hub.requests.clear()
    assert get("o/n").read_bytes() == data
    cdn = [each.headers.get("Range") for each in hub.requests if each.host == "cdn"]
    assert cdn == [f"bytes={2**19}-"] * 2


def test_a_size_that_is_not_the_files(hub: Hub) -> None:
    data = weights(2**20)
    hub.repos["o/n"] = Repo({GGUF: data})
    digest = digest_of(GGUF, data)
    for size in (len(data) - 4, len(data) + 4):
        hub.listed = [entry(size=size, lfs={"oid": digest, "size": size, "pointerSize": 1})]
        assert f"not with the {size} bytes that the hub lists" in refusal("o/n")
    blobs = CachedRepo.named("o/n").blobs
    (blobs / f"{digest}.incomplete").write_bytes(data[:100])
    assert f"127.0.0.1 has {len(data)} bytes, not the {size} that the hub lists" in refusal("o/n")


def test_who_refuses_is_told(hub: Hub) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    hub.fails_with = [403]  # of the CDN: the repository is not gated
    assert f"127.0.0.1 answered 403 for {GGUF}: Forbidden" in refusal("o/n")


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (b'{"weight_map": {"w": "pytorch_model.bin"}}', "does not name safetensors files"),
        (b'{"weight_map": {"w": "pytorch_model.bin/../x.safetensors"}}', "does not name"),
        (b'{"weight_map": {"w": "other.safetensors"}}', "has no file 'other.safetensors'"),
        (b"[" * 200_000, "is no JSON: maximum recursion depth"),
        (b'{"weight_map": {"w": "\xff"}}', "is no JSON"),
        (b"<html>", "is no JSON"),
    ],
)
def test_an_index_cannot_name_a_pickle_or_break_the_start(
    index: bytes, says: str, hub: Hub
) -> None:
    pickle = {"pytorch_model.bin": b"\x80\x04N."}
    hub.repos["o/n"] = Repo(demo_files() | {INDEX: index} | pickle)
    assert says in refusal("o/n")
    assert not hub.downloads(".bin")
    assert not hub.downloads(".safetensors")


def test_a_huge_index(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_INDEX_BYTES", 10)
    hub.repos["o/n"] = Repo(demo_files())
    assert "has more than 10 bytes, which no index has" in refusal("o/n")


def test_equal_files_are_counted_once(hub: Hub) -> None:
    same = {"a.json": b"{}", "b.json": b"{}", "c.json": b"{}"}
    hub.repos["o/n"] = Repo(demo_files() | same)
    reports: list[Progress] = []
    path = get("o/n", reports)
    assert all((path / name).read_bytes() == b"{}" for name in same)
    assert reports[-1].num_bytes == reports[-1].total_bytes
    assert reports[-1].percent == 100


def test_equal_files_on_a_file_system_without_links(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(path: Path, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", no_links)
    same = {"a.json": b"{}", "b.json": b"{}", "c.json": b"{}"}
    hub.repos["o/n"] = Repo(demo_files() | same)
    path = get("o/n")
    assert all((path / name).read_bytes() == b"{}" for name in same)
    assert not list(CachedRepo.named("o/n").blobs.iterdir())


def test_a_disk_that_fills_meanwhile_keeps_what_is_here(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = weights(2**22)
    hub.repos["o/n"] = Repo({GGUF: data})
    write = transfer.Digest.write

    def full(self: transfer.Digest, file: Any, chunk: bytes) -> None:
        if file.tell() >= 2**21:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, file, chunk)

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, 2**40))
    monkeypatch.setattr(transfer.Digest, "write", full)
    message = refusal("o/n")
    assert "No space left on device; what was downloaded is kept; make room" in message
    monkeypatch.setattr(transfer.Digest, "write", write)
    hub.requests.clear()
    assert get("o/n").read_bytes() == data
    (last,) = [each.headers["Range"] for each in hub.requests if each.host == "cdn"]
    assert int(last.removeprefix("bytes=").removesuffix("-")) >= 2**21


def test_a_wrong_draft_is_told_before_the_model_is_downloaded(hub: Hub) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    config = config_of("o/n", speculate="model:https://evil/o/draft")
    with pytest.raises(CheckpointError, match="'https://evil/o/draft' is not an address of"):
        asyncio.run(local_config(config, [].append))
    assert not hub.requests


def test_a_missing_draft_is_told_before_the_model_is_downloaded(hub: Hub) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    config = config_of("o/n", speculate="model:o/draft")
    with pytest.raises(CheckpointError, match="o/draft"):
        asyncio.run(local_config(config, [].append))
    assert not any("o/n" in each.path for each in hub.requests)


def test_the_password_of_a_proxy_is_in_no_message(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    hub.location = "https://a.invalid/x"  # through the proxy, which is the hub that refuses CONNECT
    monkeypatch.setenv("https_proxy", hub.url.replace("//", "//me:secret@"))
    message = refusal("o/n")
    assert "the proxy answered 4" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 \x1b[31mred\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 No\r\nX-Error-Message: a\x1b[31mb\xff\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 \x1b[31mred\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Header\x01\x1b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 206 No\r\nContent-Range: bytes 0-9/4\r\nContent-Length: 4\r\n\r\nGGUF",
        b"SSH-2.0-OpenSSH\r\n",
        b"",
    ],
)
def test_what_servers_say_is_told_in_one_line(answer: bytes, hub: Hub) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    with answering(answer) as address:
        hub.location = address
        assert "127.0.0.1" in refusal("o/n")


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Run a server that gives this answer to everyone."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                with client, suppress(OSError):
                    client.recv(2**16)
                    client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
