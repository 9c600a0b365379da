"""API keys: who sends a request, and what an administrator's key allows."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, Unauthorized


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. owner: names the key without revealing it; "" when the server is open."""

    owner: str = ""
    is_admin: bool = False


OPEN = Caller()


class Auth:
    """The keys, kept and compared as SHA-256 digests, all of them each time, so that timing tells nothing.

    With user keys every route but the probes needs one; without, the server is open. The constructor raises ConfigError
    for a key file that cannot be read or holds no key.
    """

    def __init__(self, config: ServerConfig) -> None:
        keys = [*config.api_key, *_read_keys(config.api_key_file, "--api-key-file")]
        self._user = [_digest(key) for key in keys]
        self._admin = [_digest(key) for key in _read_keys(config.admin_key_file, "--admin-key-file")]
        self.required = bool(keys)
        self.has_admins = bool(self._admin)
        self.has_keys = self.required or self.has_admins
        self.several_owners = len(keys) > 1  # whether their requests must be kept apart
        if not all(keys):
            raise ConfigError("--api-key: an empty key protects nothing")

    def check(self, headers: Mapping[str, str]) -> Caller:
        """Returns the caller. Raises Unauthorized unless the request carries a known key or none is needed."""
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")
        digest = _digest(key)
        is_admin = sum(hmac.compare_digest(known, digest) for known in self._admin) > 0  # any() would stop at a match
        is_user = sum(hmac.compare_digest(known, digest) for known in self._user) > 0
        if is_admin or is_user:
            return Caller(digest.hex()[:16], is_admin)
        if not self.required:
            return OPEN
        raise Unauthorized("missing or wrong API key; send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read_keys(path: str | None, flag: str) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} {path}: no key in it; one per line is expected")
    return keys
