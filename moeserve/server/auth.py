"""Who may call what. With keys configured everything but the probes needs one; without, the server is open.

Keys are kept and compared as SHA-256 digests, all of them each time, so that timing tells nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, Unauthorized

MAX_KEY_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Caller:
    """`owner` names the key without revealing it; "" when the server is open."""

    owner: str = ""
    is_admin: bool = False


OPEN = Caller()


class Auth:
    """Raises ConfigError for a key file that cannot be read or holds no key."""

    def __init__(self, config: ServerConfig) -> None:
        keys = [*config.api_key, *_read_keys(config.api_key_file, "--api-key-file")]
        self._user = [_digest(key) for key in keys]
        self._admin = [_digest(key) for key in _read_keys(config.admin_key_file, "--admin-key-file")]
        if any(not key for key in keys):
            raise ConfigError("--api-key: an empty key protects nothing")

    @property
    def required(self) -> bool:
        return bool(self._user)

    @property
    def has_admins(self) -> bool:
        return bool(self._admin)

    @property
    def several_owners(self) -> bool:
        return len(self._user) > 1

    def check(self, headers: Mapping[str, str]) -> Caller:
        """Raises Unauthorized unless the request carries a known key (or none is needed)."""
        presented = _presented(headers)
        digest = _digest(presented or "")
        is_admin = _any_equal(self._admin, digest)
        is_user = _any_equal(self._user, digest)
        if presented is not None and (is_admin or is_user):
            return Caller(digest.hex()[:16], is_admin)
        if not self._user:
            return OPEN
        raise Unauthorized("missing or wrong API key; send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`")


def _presented(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    found = key.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key")
    return found if found and len(found) <= MAX_KEY_CHARS else None


def _any_equal(digests: list[bytes], digest: bytes) -> bool:
    found = False
    for known in digests:  # every one is compared, also after a match
        found |= hmac.compare_digest(known, digest)
    return found


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
