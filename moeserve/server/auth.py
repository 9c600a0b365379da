"""API keys: who sends a request, and what that key allows."""

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, Unauthorized
from moeserve.server.keys import KeyEntry, digest_of, read_keys
from moeserve.server.rates import Rates


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. owner: names the key without revealing it; "" when the server is open.

    name: the owner for people. rates, priority: what the key file says of this key.
    """

    owner: str = ""
    is_admin: bool = False
    name: str = ""
    rates: Rates | None = None
    priority: int | None = None


OPEN = Caller()


class Auth:
    """The keys, kept and compared as SHA-256 digests, all of them each time, so that timing tells nothing.

    With user keys every route but the probes needs one; without, the server is open. The constructor and `reload` raise
    ConfigError for a key file that cannot be read or holds no key. paths: the files that `reload` reads.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._callers: dict[bytes, Caller] = {}
        self.paths = [path for path in (config.api_key_file, config.admin_key_file) if path is not None]
        if not all(config.api_key):
            raise ConfigError("--api-key: an empty key protects nothing")
        self.reload()

    def reload(self) -> None:
        """Reads the key files. What a key has used of its rates stays known as long as its limits do."""
        config = self._config
        users: Sequence[KeyEntry] = [KeyEntry(key=key) for key in dict.fromkeys(config.api_key)]
        admins: Sequence[KeyEntry] = []
        if config.api_key_file is not None:
            users = [*users, *read_keys(config.api_key_file, "--api-key-file")]
        if config.admin_key_file is not None:
            admins = read_keys(config.admin_key_file, "--admin-key-file")
        known = self._callers
        self._callers = {entry.digest: _caller(entry, known, is_admin=False) for entry in users}
        self._callers |= {entry.digest: _caller(entry, known, is_admin=True) for entry in admins}
        self.required = bool(users)
        self.has_admins = bool(admins)
        self.has_keys = self.required or self.has_admins
        self.several_owners = len(users) > 1  # whether their requests must be kept apart

    def owner(self, name: str, name_of: Callable[[str], str]) -> Caller:
        """Returns the caller whose owner `name_of` calls `name`; that of an open server if there is no such key."""
        return next((caller for caller in self._callers.values() if name_of(caller.owner) == name), OPEN)

    def check(self, headers: Mapping[str, str]) -> Caller:
        """Returns the caller. Raises Unauthorized unless the request carries a known key or none is needed."""
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")
        digest = digest_of(key)
        callers = [caller for known, caller in self._callers.items() if hmac.compare_digest(known, digest)]
        if callers:
            return callers[0]
        if not self.required:
            return OPEN
        raise Unauthorized("missing or wrong API key; send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`")


def _caller(entry: KeyEntry, known: Mapping[bytes, Caller], *, is_admin: bool) -> Caller:
    owner = entry.digest.hex()[:16]
    limits = entry.requests_per_minute, entry.tokens_per_minute
    before = known.get(entry.digest)
    rates = before.rates if before is not None else None
    if rates is None or rates.limits != limits:
        rates = Rates(*limits)
    return Caller(owner, is_admin, entry.name or owner, rates if any(limits) else None, entry.priority)
