"""A small hub on this machine, which speaks the protocol of huggingface.co.

Large files (LFS) are redirected to another address, as the hub redirects to its CDN.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = "hf_secret"
LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")
CHUNK = 64 * 1024


@dataclass
class Repo:
    """A repository with one commit."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    revisions: tuple[str, ...] = ("main",)

    @property
    def commit(self) -> str:
        text = json.dumps({path: digest_of(path, data) for path, data in self.files.items()})
        return hashlib.sha1(text.encode()).hexdigest()


@dataclass
class Request:
    """A request that the hub or its CDN got."""

    host: str  # "hub" or "cdn"
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Hub:
    """The hub's state; tests change it while it runs."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    cdn_url: str = ""
    ignores_ranges: bool = False
    breaks_after: list[int] = field(default_factory=list)  # bytes of the next answers of the CDN
    stalls_after: int | None = None  # bytes after which the CDN waits for `released`
    damages: int = 0  # answers of the CDN whose first byte is wrong
    fails_with: list[int] = field(default_factory=list)  # statuses of the next answers of the CDN
    listed: Any = None  # a listing in place of the right one
    next_page: str = ""  # the address of the listing's next page, relative or not
    moved_to: str = ""  # the address to which the hub sends those who ask for a model
    location: str = ""  # the address to which the hub sends for a file, in place of the CDN's
    pages: list[bytes] = field(default_factory=list)  # web pages in place of the CDN's next answers
    released: threading.Event = field(default_factory=threading.Event)
    num_sent: int = 0  # bytes that the CDN has sent

    def downloads(self, suffix: str = "") -> list[Request]:
        """Return the requests for the content of files whose names end so."""
        return [
            request
            for request in self.requests
            if "/api/" not in request.path and request.path.endswith(suffix)
        ]

    async def list_models(self, request: web.Request) -> web.Response:
        if self.moved_to:
            self._note("hub", request)
            return web.Response(status=307, headers={"Location": self.moved_to})
        repo = self._repo(request)
        if isinstance(repo, web.Response):
            return repo
        siblings = [{"rfilename": path} for path in repo.files]
        name = request.match_info["repo"]
        body = {"id": name, "sha": repo.commit, "gated": repo.gated, "siblings": siblings}
        return web.json_response(body)

    async def list_tree(self, request: web.Request) -> web.Response:
        repo = self._repo(request)
        if isinstance(repo, web.Response):
            return repo
        headers = {"Link": f'<{self.next_page}>; rel="next"'} if self.next_page else {}
        if self.listed is not None:
            return web.json_response(self.listed, headers=headers)
        entries = [_entry(path, data) for path, data in repo.files.items()]
        return web.json_response(entries, headers=headers)

    async def resolve(self, request: web.Request) -> web.StreamResponse:
        repo = self._repo(request)
        if isinstance(repo, web.Response):
            return repo
        path = request.match_info["path"]
        if path not in repo.files:
            return _error(404, "EntryNotFound")
        if repo.gated and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _error(403 if "Authorization" in request.headers else 401, "GatedRepo")
        data = repo.files[path]
        digest = digest_of(path, data)
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{digest}"'}
        if not path.endswith(LFS_SUFFIXES):
            return web.Response(body=data, headers=headers)
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{digest}"'}
        headers["Location"] = f"{self.cdn_url}/{request.match_info['repo']}/{path}?sign=1"
        if self.location:
            headers["Location"] = self.location
        return web.Response(status=302, headers=headers)

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Answer as the CDN: the content, from the first byte that is asked for."""
        self._note("cdn", request)
        if self.fails_with:
            return web.Response(status=self.fails_with.pop(0))
        if self.pages:
            return web.Response(body=self.pages.pop(0), content_type="text/html")
        owner, name, path = request.path.lstrip("/").split("/", 2)
        data = self.repos[f"{owner}/{name}"].files[path]
        start = 0
        end = len(data)
        asked = request.headers.get("Range")
        response = web.StreamResponse()
        if asked and not self.ignores_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first)
            end = int(last) + 1 if last else len(data)
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        body = data[start:end]
        if self.damages:
            self.damages -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        response.content_length = len(body)
        await response.prepare(request)
        limit = self.breaks_after.pop(0) if self.breaks_after else len(body)
        for at in range(0, limit, CHUNK):
            if self.stalls_after is not None and at >= self.stalls_after:
                await asyncio.to_thread(self.released.wait)
            await response.write(body[at : min(at + CHUNK, limit)])
            self.num_sent += min(CHUNK, limit - at)
        if limit < len(body) and request.transport is not None:
            request.transport.abort()
        return response

    def _repo(self, request: web.Request) -> Repo | web.Response:
        self._note("hub", request)
        key = request.headers.get("Authorization")
        if key not in (None, f"Bearer {TOKEN}", "Bearer hf_other"):
            wrong = "Invalid credentials in Authorization header"
            return web.json_response(
                {"error": wrong}, status=401, headers={"X-Error-Message": wrong}
            )
        repo = self.repos.get(request.match_info["repo"])
        if repo is None or (repo.private and key != f"Bearer {TOKEN}"):
            return _error(401 if key is None else 404, "RepoNotFound")
        if request.match_info["revision"] not in (*repo.revisions, repo.commit):
            return _error(404, "RevisionNotFound")
        return repo

    def _note(self, host: str, request: web.Request) -> None:
        headers = dict(request.headers)
        self.requests.append(Request(host, request.method, request.path, headers))

    async def other(self, request: web.Request) -> web.Response:
        self._note("hub", request)
        return web.Response(status=404)


def digest_of(path: str, data: bytes) -> str:
    """Return what the hub lists as a file's digest."""
    if path.endswith(LFS_SUFFIXES):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
    entry["oid"] = hashlib.sha1(data).hexdigest()
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"oid": digest_of(path, data), "size": len(data), "pointerSize": 130}
    else:
        entry["oid"] = digest_of(path, data)
    return entry


def _error(status: int, code: str) -> web.Response:
    return web.json_response({"error": code}, status=status, headers={"X-Error-Code": code})


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub and its CDN in a thread, on free ports."""
    hub = Hub()
    loop = asyncio.new_event_loop()
    runners: list[web.AppRunner] = []

    async def start(handlers: dict[str, Any]) -> str:
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_route("*", path, handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def start_both() -> None:
        hub.url = await start(
            {
                r"/api/models/{repo:[^/]+/[^/]+}/revision/{revision:.+}": hub.list_models,
                r"/api/models/{repo:[^/]+/[^/]+}/tree/{revision:[^/]+}": hub.list_tree,
                r"/{repo:[^/]+/[^/]+}/resolve/{revision:[^/]+}/{path:.+}": hub.resolve,
                r"/{rest:.*}": hub.other,
            }
        )
        hub.cdn_url = await start({r"/{rest:.*}": hub.send})

    async def stop() -> None:
        hub.released.set()
        for runner in runners:
            await runner.cleanup()
        await asyncio.sleep(0.01)  # closed connections close their sockets in a later turn

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(start_both(), loop).result()
    try:
        yield hub
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
