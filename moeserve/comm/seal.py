"""Encryption of the messages between ranks of different machines over a `Mesh`, with AES-256-GCM.

Each direction between two ranks has its own key, which is derived (HKDF-SHA256) from the secret
that the members of an epoch share. A message's nonce is its position: channel, exchange, and number
within the exchange. Both ends know it, so it is not sent, and each nonce is used once per key. A
message that was altered, repeated or moved cannot be decrypted.

Format of an encrypted message: length of the plain message (8 bytes, authenticated), ciphertext,
tag (16 bytes).
"""

import struct
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from moeserve.comm.envelope import Envelope
from moeserve.comm.members import Members

HEAD_BYTES = 8
TAG_BYTES = 16


class Seal:
    """The keys of one rank of a mesh. name: the mesh's name, unique within the epoch."""

    def __init__(self, members: Members, name: str) -> None:
        own = members.rank
        host_of = members.host_of
        remote_ranks = [rank for rank in range(members.size) if host_of[rank] != host_of[own]]
        # By the other rank, for ranks on other machines only.
        self.send_keys = {
            rank: _key(members.token, f"{name}: {own} to {rank}") for rank in remote_ranks
        }
        self.receive_keys = {
            rank: _key(members.token, f"{name}: {rank} to {own}") for rank in remote_ranks
        }

    def envelope(self, channel: int, exchange: int) -> Envelope:
        """Return the encoding of an exchange's messages."""
        return SealedEnvelope(self, channel, exchange)


class SealedEnvelope(Envelope):
    """The encoding of one exchange's messages, which are uint8 [n].

    Messages between ranks of the same machine are not encrypted.
    """

    def __init__(self, seal: Seal, channel: int, exchange: int) -> None:
        self._seal = seal
        self._position = (channel, exchange)
        # Messages so far, by peer:
        self._num_expected: Counter[int] = Counter()
        self._num_sent: Counter[int] = Counter()

    def receive_buffer(self, peer: int, into: Tensor) -> tuple[Tensor, Callable[[], None]]:
        if peer not in self._seal.receive_keys:
            return super().receive_buffer(peer, into)
        sealed = torch.empty(HEAD_BYTES + into.numel() + TAG_BYTES, dtype=torch.uint8)
        nonce = self._next_nonce(self._num_expected, peer)
        return sealed, partial(self._decrypt, peer, sealed, into, nonce)

    def encode(self, peer: int, message: Tensor) -> Tensor:
        if peer not in self._seal.send_keys:
            return message
        sealed = torch.empty(HEAD_BYTES + message.numel() + TAG_BYTES, dtype=torch.uint8)
        sealed_bytes = sealed.numpy().data
        head = sealed_bytes[:HEAD_BYTES]
        body = sealed_bytes[HEAD_BYTES:]
        head[:] = message.numel().to_bytes(HEAD_BYTES, "big")
        nonce = self._next_nonce(self._num_sent, peer)
        self._seal.send_keys[peer].encrypt_into(nonce, message.numpy().data, head, body)
        return sealed

    def _next_nonce(self, num_messages: Counter[int], peer: int) -> bytes:
        number = num_messages[peer]
        num_messages[peer] += 1
        return struct.pack(">HQH", *self._position, number)

    def _decrypt(self, peer: int, sealed: Tensor, into: Tensor, nonce: bytes) -> None:
        sealed_bytes = sealed.numpy().data
        head = sealed_bytes[:HEAD_BYTES]
        num_bytes = int.from_bytes(head, "big")
        try:
            if num_bytes > into.numel():
                raise InvalidTag
            body = sealed_bytes[HEAD_BYTES:][: num_bytes + TAG_BYTES]
            message = into.numpy().data[:num_bytes]
            self._seal.receive_keys[peer].decrypt_into(nonce, body, head, message)
        except InvalidTag:
            raise PermissionError(
                "sent a message that was altered on the way, or is not its own"
            ) from None


def _key(secret: str, purpose: str) -> AESGCM:
    return AESGCM(
        HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose.encode()).derive(
            secret.encode()
        )
    )
