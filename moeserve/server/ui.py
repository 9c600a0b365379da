"""The page at `/` and its files: conversations with the model and a live view of the engine.

The page uses the API like any client. It loads without a key, and asks for one when the API needs
it. Its content security policy allows only files and routes of this server.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import web

from moeserve.errors import NotFound
from moeserve.server.call import HttpCall
from moeserve.server.errors import shorten

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
_HEADERS = {
    # Browsers cache the files but revalidate them, since the files of one version belong together.
    "Cache-Control": "no-cache",
    # No script can parse a string as HTML but DOMPurify, which the page gives what models write.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; font-src 'self'; connect-src 'self'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def _files() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Return the bodies and headers of all files by name. No name of a request becomes a path."""
    assets = {}
    for name, entry in _walk(files("moeserve") / "assets" / "ui"):
        content_type = _TYPES.get(name.rpartition(".")[2])
        if content_type is None:  # licences of vendored files
            continue
        body = entry.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        assets[name] = (body, {"ETag": etag, "Content-Type": content_type})
    return assets


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yield the files of a folder and their paths in it."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


async def page(call: HttpCall) -> web.StreamResponse:
    """Return the page."""
    return _send(call, "index.html")


async def asset(call: HttpCall) -> web.StreamResponse:
    """Return a file of the page."""
    return _send(call, call.tail)


def _send(call: HttpCall, name: str) -> web.Response:
    """Return the answer with a file. Raise NotFound if there is none of that name."""
    file = _files().get(name)
    if file is None:
        raise NotFound(f"the page has no file {shorten(name)!r}")
    body, own = file
    headers = call.headers() | _HEADERS | own
    known = call.request.headers.get("If-None-Match", "")
    # A proxy that compresses makes the tag weak (W/"..."), which is sufficient here.
    if own["ETag"] in known:
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, headers=headers)
