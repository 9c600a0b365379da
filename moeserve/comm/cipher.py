"""Encryption of one direction of a stream between machines, with AES-256-GCM.

A message's nonce is its number in the stream. Both ends know it, so it is not sent. A message that
was altered, repeated, removed or inserted cannot be decrypted.

The length before each message must be authenticated separately, because the receiver needs it
before the message. Its code is (length * k + r) modulo a prime (Carter and Wegman), with the same k
and a new r for each message.
"""

import hashlib
import struct
from collections.abc import Iterator
from itertools import count

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher as BlockCipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

NONCE_BYTES = 12
SEALED_HEADER = struct.Struct("<IQ")  # length of the message that follows, and its code
ALTERED = "a message that was altered on the way, or is not its own"
_PRIME = (1 << 61) - 1
_PAD = struct.Struct("<Q")
_PADS_BYTES = 512 * _PAD.size  # pads are computed in batches of this size


class Cipher:
    """Encrypts the messages of one direction at one end, or decrypts them at the other end.

    key: 32 bytes, used for no other stream.
    """

    header_bytes = SEALED_HEADER.size

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._nonces = (number.to_bytes(NONCE_BYTES, "big") for number in count())
        self._pads = _pads(hashlib.sha256(b"lengths" + key).digest())
        self._factor = next(self._pads)

    def seal(self, text: bytes) -> bytes:
        """Encrypt the next message. Return `SEALED_HEADER`, ciphertext and a tag of 16 bytes."""
        sealed = self._aead.encrypt(next(self._nonces), text, None)
        return SEALED_HEADER.pack(len(sealed), self._code(len(sealed))) + sealed

    def length(self, header: bytearray) -> int:
        """Return how many bytes of the next message follow its header.

        Call this once per message. Raises ValueError if the length was altered.
        """
        num_bytes, code = SEALED_HEADER.unpack_from(header)
        if code != self._code(num_bytes):
            raise ValueError(ALTERED)
        return int(num_bytes)

    def open(self, sealed: bytes) -> bytes:
        """Decrypt the next message. Raises ValueError if the other end did not send it."""
        try:
            return self._aead.decrypt(next(self._nonces), sealed, None)
        except InvalidTag:
            raise ValueError(ALTERED) from None

    def _code(self, num_bytes: int) -> int:
        return (num_bytes * self._factor + next(self._pads)) % _PRIME


def _pads(key: bytes) -> Iterator[int]:
    """Yield pseudorandom 64-bit numbers, the keystream of AES-CTR."""
    stream = BlockCipher(AES(key), CTR(bytes(16))).encryptor()
    while True:
        for (pad,) in _PAD.iter_unpack(stream.update(bytes(_PADS_BYTES))):
            yield pad
