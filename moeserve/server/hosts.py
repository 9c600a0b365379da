"""The check of the Host header, which stops DNS rebinding.

A web page may point its own name at 127.0.0.1. For the browser, a server there is then part of the
page's site: the page may send any request and read the answers. CORS does not apply, since nothing
crosses origins. But the browser still sends the page's name, in Host.
"""

import ipaddress
import re

from aiohttp import web

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, Forbidden
from moeserve.server.errors import shorten
from moeserve.server.http import split_target

_LOOPBACK_NAMES = {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}
_HOST = re.compile(r"\*|[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]+")


class Hosts:
    """The allowed hosts: loopback names and addresses, and those of `allowed_hosts`.

    The check applies on a loopback address without keys, and whenever `allowed_hosts` is set.
    Raise ConfigError for an invalid host in `allowed_hosts`.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._listed = {host.lower().strip("[]") for host in config.allowed_hosts}
        for host in self._listed:
            if not _HOST.fullmatch(host):
                what = "expected a name or an address without scheme, port and path, or *"
                raise ConfigError(f"allowed_hosts: {host!r}: {what}")
        self._is_local = is_loopback(config.host)

    def check(self, request: web.BaseRequest, *, keyless: bool) -> None:
        """Raise Forbidden for a request to a host that this server does not answer to.

        keyless: whether the request needs no API key.
        """
        if "*" in self._listed or not (self._listed or (self._is_local and keyless)):
            return
        host = host_of(request)
        if host is None or is_loopback(host) or host in self._listed:
            return
        raise Forbidden(
            f"this server does not answer to the host {shorten(host)!r}: without an API key it "
            "takes names of this machine only; add the name to `server: {allowed_hosts: [...]}` "
            "in its --config, or require a key",
            code="host_not_allowed",
        )


def host_of(request: web.BaseRequest) -> str | None:
    """Return the host of a request, without its port. None if the client names none."""
    authority = split_target(request)[0] or request.headers.get("Host", "")
    authority = authority.rpartition("@")[2].lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].rstrip(".") or None


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine, independent of name servers."""
    host = host.lower().strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in _LOOPBACK_NAMES or host.endswith(".localhost")
