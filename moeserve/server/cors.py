"""CORS: the web pages of other origins that may call the server from a browser.

`--allowed-origins` lists them. Other pages cannot read an answer. Browsers do not even send their
requests, except those that an HTML form could send. `check_form` refuses these.
"""

import re
from urllib.parse import urlsplit

from aiohttp import web

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, Forbidden
from moeserve.server.errors import shorten

MAX_AGE_S = 600
EXPOSED = (
    "X-Request-Id, Request-Id, Retry-After, Retry-After-Ms, Warning, X-RateLimit-Limit-Requests, "
    "X-RateLimit-Remaining-Requests, X-RateLimit-Reset-Requests, "
    "X-RateLimit-Limit-Tokens, X-RateLimit-Remaining-Tokens, X-RateLimit-Reset-Tokens"
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,?#]+")
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~ ,-]{0,2000}")


class Cors:
    """The allowed origins: an exact list, or "*"."""

    def __init__(self, config: ServerConfig) -> None:
        """Raise ConfigError for an origin that no browser sends."""
        self._any = "*" in config.allowed_origins
        self._origins = frozenset(config.allowed_origins)
        for origin in self._origins - {"*", "null"}:
            if not _ORIGIN.fullmatch(origin):
                what = "expected scheme://host[:port] in small letters, without a path, or *"
                raise ConfigError(f"--allowed-origins {origin}: {what}")

    def allows(self, origin: str) -> bool:
        """Return whether pages of this origin may call the server."""
        return self._any or origin in self._origins

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the headers that let a page read this answer, if it may."""
        if self._any:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": EXPOSED}
        origin = request.headers.get("Origin", "")
        if origin not in self._origins:
            return {
                "Vary": "Origin"
            }  # so that no cache serves this answer to another origin's page
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """Return the answer to a browser's preflight request; None for other requests.

        A preflight has no API key; the actual request has.
        """
        headers = self.headers(request)
        method = request.headers.get("Access-Control-Request-Method")
        if (
            request.method != "OPTIONS"
            or not method
            or "Access-Control-Allow-Origin" not in headers
        ):
            return None
        names = request.headers.get("Access-Control-Request-Headers", "")
        headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE"
        headers["Access-Control-Max-Age"] = str(MAX_AGE_S)
        if names and _NAMES.fullmatch(names):
            # Each by name: "*" would not include Authorization.
            headers["Access-Control-Allow-Headers"] = names
        return web.Response(status=204, headers=headers)


def check_form(request: web.BaseRequest, cors: Cors | None) -> None:
    """Raise Forbidden for a form of a web page that may not call the server.

    Only browsers send Origin. They send a form to another origin without a preflight.
    """
    origin = request.headers.get("Origin")
    if origin is None or (cors is not None and cors.allows(origin)):
        return
    if urlsplit(origin).netloc.lower() != request.host.lower():
        what = f"web pages of {shorten(origin)!r} may not send forms here; see --allowed-origins"
        raise Forbidden(what, code="origin_not_allowed")
