"""The handshake of a connection between processes: addresses, CURVE keys, and the first frames.

Over TCP, all machines of a cluster share one secret, from which the keys are derived. The public
key of the listener authenticates it to the connecting process. The token in the first frame, which
CURVE encrypts, authenticates the connecting process to the listener. Unix sockets are in a private
folder, and need only the token.
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
MAX_PATH_BYTES = 107  # length of a Unix socket's path (sun_path without the final zero)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame in each direction. A sender without the right token is ignored."""

    version: int
    token: str


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The listener's reply to a peer with the right token but another protocol version."""

    cause: str


def answer_hello(hello: Hello, own: Hello) -> Hello | Refusal | None:
    """Return a listener's reply to a hello: its own hello, or a refusal if the protocol versions
    differ. None: the token is wrong, so do not reply.
    """
    if not hmac.compare_digest(hello.token.encode(), own.token.encode()):
        return None
    if hello.version != own.version:
        return Refusal(
            f"the connecting process speaks message protocol {hello.version}, the listening one"
            f" {own.version}: moeserve was changed while it ran, or differs between machines;"
            " install the same version everywhere and restart it"
        )
    return own


def check_address(address: str, keys: "Keys | None") -> None:
    """Raise ConfigError unless this is `tcp://` with keys, or `ipc://` in a private folder."""
    if address.startswith("tcp://"):
        if keys is None:
            raise ConfigError(
                f"{address}: messages over a network need CURVE keys; pass a --cluster-key-file"
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
    """Z85-encoded CURVE key pairs of the two sides of a connection."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def secure(socket: zmq.Socket[Any], keys: Keys, *, listens: bool) -> None:
    """Set up CURVE encryption and authentication of a socket, before it is bound or connected.

    listens: whether the socket is that of the listener.
    """
    if listens:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
    socket.setsockopt(zmq.IPV6, 1)


def keys_of(secret: bytes) -> Keys:
    """Derive the keys from a secret. The same secret gives the same keys on all machines."""

    def private_key(side: bytes) -> bytes:
        return z85.encode(hmac.digest(secret, b"moeserve curve 1 " + side, hashlib.sha256))

    server_secret = private_key(b"server")
    client_secret = private_key(b"client")
    return Keys(
        server_public=zmq.curve_public(server_secret),
        server_secret=server_secret,
        client_public=zmq.curve_public(client_secret),
        client_secret=client_secret,
    )


def token_of(secret: bytes, purpose: str) -> str:
    """Derive a token for one purpose from a secret."""
    return hmac.digest(secret, b"moeserve token 1 " + purpose.encode(), hashlib.sha256).hex()


def read_secret(path: str) -> bytes:
    """Read the cluster's secret from a file.

    Raises ConfigError if other users can read the file, or if the secret is too short.
    """
    with ConfigError.instead_of(OSError, f"--cluster-key-file: cannot read {path}"):
        info = os.stat(path)
        secret = Path(path).read_bytes().strip()
    mode = stat.S_IMODE(info.st_mode)
    # A Kubernetes Secret in a pod whose user is not root: the file belongs to root, and the pod's
    # group (fsGroup) may read it.
    is_kubernetes_secret = info.st_uid == 0 and os.geteuid() != 0
    forbidden_mode = 0o037 if is_kubernetes_secret else 0o077
    if mode & forbidden_mode:
        raise ConfigError(
            f"--cluster-key-file: {path} can be read by others (mode {mode:o}); run: chmod 600"
            f" {path}"
        )
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--cluster-key-file: {path} has {len(secret)} bytes, but a secret needs at least"
            f" {MIN_SECRET_BYTES}; create one: head -c 32 /dev/urandom | base64 > {path}"
        )
    return secret
