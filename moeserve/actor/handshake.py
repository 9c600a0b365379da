"""The two sides of a wire find each other and prove who they are: addresses, CURVE keys, and the
first frames.

Over TCP all machines of a cluster share one secret, from which the keys are derived. The listener's
public key authenticates it to those who connect; the token in the first frame, which CURVE
encrypts, authenticates them to the listener. Sockets of one machine are in a folder that nobody
else can enter, and need the token only.
"""

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from moeserve.errors import ConfigError

MIN_SECRET_BYTES = 16
MAX_PATH_BYTES = 107  # sun_path of a Unix socket, its end mark excluded


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame in each direction. Its sender is a stranger without the right token."""

    version: int
    token: str


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The listener's answer to a peer with the right token and another protocol version."""

    cause: str


def answer_hello(hello: Hello, own: Hello) -> Hello | Refusal | None:
    """Return a listener's answer to a hello: its own, a refusal to another protocol version, None
    to a stranger.
    """
    if not hmac.compare_digest(hello.token.encode(), own.token.encode()):
        return None
    if hello.version != own.version:
        return Refusal(
            f"the connecting process speaks message protocol {hello.version}, the listening one"
            f" {own.version}: "
            "moeserve was changed while it ran, or differs between machines; install the same and"
            " restart it"
        )
    return own


def check_address(address: str, keys: "Keys | None") -> None:
    """Raise ConfigError unless this is `tcp://` with keys, or `ipc://` in a folder that only we
    can enter.
    """
    if address.startswith("tcp://"):
        if keys is None:
            raise ConfigError(
                f"{address}: messages cross a network only with CURVE keys; give a"
                " --cluster-key-file"
            )
        return
    path = address.removeprefix("ipc://")
    if path == address:
        raise ConfigError(f"{address}: must begin with ipc:// or tcp://")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"{path} is longer than the {MAX_PATH_BYTES} bytes of a socket path; set TMPDIR to a"
            " shorter one"
        )
    folder = os.path.dirname(path) or "."
    with ConfigError.instead_of(OSError, f"cannot use {folder} for sockets"):
        mode = os.stat(folder).st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"{folder} can be entered by others (mode {mode:o}); it must have mode 700"
        )


@dataclass(frozen=True, slots=True)
class Keys:
    """Z85-encoded CURVE key pairs of the two sides of a wire."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def secure(socket: zmq.Socket[Any], keys: Keys, *, listens: bool) -> None:
    """Encrypt and authenticate a socket by CURVE, before it is bound or connected."""
    public, secret = keys.client_public, keys.client_secret
    if listens:
        public, secret = keys.server_public, keys.server_secret
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    if listens:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.IPV6, 1)


def keys_of(secret: bytes) -> Keys:
    """Return the keys of a secret, the same on every machine."""
    pairs = []
    for side in (b"server", b"client"):
        private = z85.encode(hmac.digest(secret, b"moeserve curve 1 " + side, hashlib.sha256))
        pairs += [zmq.curve_public(private), private]
    return Keys(*pairs)


def token_of(secret: bytes, purpose: str) -> str:
    """Return a token for one purpose, which only those who know the secret can derive."""
    return hmac.digest(secret, b"moeserve token 1 " + purpose.encode(), hashlib.sha256).hex()


def read_secret(path: str) -> bytes:
    """Read the cluster's secret from a file. Raises ConfigError when others can read the file, or
    it is too short.
    """
    with ConfigError.instead_of(OSError, f"--cluster-key-file: cannot read {path}"):
        info = os.stat(path)
        secret = Path(path).read_bytes().strip()
    mode = stat.S_IMODE(info.st_mode)
    # A Secret in a pod whose user is not root: root owns it, and lets the pod's own group (fsGroup)
    # read it.
    others = 0o037 if info.st_uid == 0 != os.geteuid() else 0o077
    if mode & others:
        raise ConfigError(
            f"--cluster-key-file: {path} can be read by others (mode {mode:o}); run: chmod 600"
            f" {path}"
        )
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--cluster-key-file: {path} holds {len(secret)} bytes and a secret needs"
            f" {MIN_SECRET_BYTES}; "
            f"make one: head -c 32 /dev/urandom | base64 > {path}"
        )
    return secret
