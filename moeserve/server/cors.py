"""CORS: which web pages of other origins may call the server from a browser (`--allowed-origins`)."""

import re

from aiohttp import web

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError

MAX_AGE_S = 600
EXPOSED = (
    "X-Request-Id, Request-Id, Retry-After, Retry-After-Ms, Warning, X-RateLimit-Limit-Requests, "
    "X-RateLimit-Remaining-Requests, X-RateLimit-Reset-Requests, "
    "X-RateLimit-Limit-Tokens, X-RateLimit-Remaining-Tokens, X-RateLimit-Reset-Tokens"
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,?#]+")
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~ ,-]{0,2000}")


class Cors:
    """The allowed origins, as an exact list or "*". Raises ConfigError for one that no browser
    could send.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._any = "*" in config.allowed_origins
        self._origins = frozenset(config.allowed_origins)
        for origin in self._origins - {"*", "null"}:
            if not _ORIGIN.fullmatch(origin):
                what = "expected scheme://host[:port] in small letters, without a path, or *"
                raise ConfigError(f"--allowed-origins {origin}: {what}")

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Returns the headers that let the page read this answer; none for a page that may not."""
        if self._any:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": EXPOSED}
        origin = request.headers.get("Origin", "")
        if origin not in self._origins:
            return {"Vary": "Origin"}  # so that no cache gives this answer to another origin's page
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """Returns the answer to a browser that asks before the actual request, which has the key;
        None to others.
        """
        headers = self.headers(request)
        method = request.headers.get("Access-Control-Request-Method")
        if (
            request.method != "OPTIONS"
            or not method
            or "Access-Control-Allow-Origin" not in headers
        ):
            return None
        asked = request.headers.get("Access-Control-Request-Headers", "")
        headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE"
        headers["Access-Control-Max-Age"] = str(MAX_AGE_S)
        if asked and _NAMES.fullmatch(asked):
            headers["Access-Control-Allow-Headers"] = (
                asked  # all of them: "*" would leave out Authorization
            )
        return web.Response(status=204, headers=headers)
