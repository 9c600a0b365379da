"""CURVE keys for wires over TCP, derived from one secret that all machines of a cluster share.

Only processes that know the secret can derive the keys. The listener's public key authenticates it to those who
connect; the token in the first frame, which CURVE encrypts, authenticates them to the listener.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from moeserve.errors import ConfigError

MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class Keys:
    """Z85-encoded CURVE key pairs of the two sides of a wire."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def keys_of(secret: bytes) -> Keys:
    """Returns the keys of a secret, the same on every machine."""
    pairs = []
    for side in (b"server", b"client"):
        private = z85.encode(hmac.digest(secret, b"moeserve curve 1 " + side, hashlib.sha256))
        pairs += [zmq.curve_public(private), private]
    return Keys(*pairs)


def token_of(secret: bytes, purpose: str) -> str:
    """Returns a token for one purpose, which only those who know the secret can derive."""
    return hmac.digest(secret, b"moeserve token 1 " + purpose.encode(), hashlib.sha256).hex()


def read_secret(path: str) -> bytes:
    """Reads the cluster's secret from a file. Raises ConfigError when others can read the file, or it is too short."""
    try:
        mode = os.stat(path).st_mode
        secret = Path(path).read_bytes().strip()
    except OSError as exc:
        raise ConfigError(f"--cluster-key-file: cannot read {path}: {exc}") from exc
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"--cluster-key-file: {path} can be read by others (mode {stat.S_IMODE(mode):o}); run: chmod 600 {path}"
        )
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--cluster-key-file: {path} holds {len(secret)} bytes and a secret needs {MIN_SECRET_BYTES}; "
            f"make one: head -c 32 /dev/urandom | base64 > {path}"
        )
    return secret
