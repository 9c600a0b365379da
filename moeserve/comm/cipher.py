"""Encryption of one direction of a stream between machines: AES-256-GCM, and lengths that cannot be
altered either.

A message's nonce is its number in the stream. Both ends know it, so it does not travel, and what
was altered, repeated, left out or put in does not open. The length before it, by which the other
end knows how long to wait, has a code of its own: length * k + r modulo a prime (Carter and
Wegman), k the same and r another one for each message.
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
SEALED_HEADER = struct.Struct("<IQ")  # bytes of the message behind it, and the code of that number
ALTERED = "a message that was altered on the way, or is not its own"
_PRIME = (1 << 61) - 1
_PAD = struct.Struct("<Q")
_PADS_BYTES = 512 * _PAD.size  # made at once


class Cipher:
    """Seals the messages of one direction at one end, or opens them at the other. key: 32 bytes, of
    no other stream.
    """

    header_bytes = SEALED_HEADER.size

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._nonces = (number.to_bytes(NONCE_BYTES, "big") for number in count())
        self._pads = _pads(hashlib.sha256(b"lengths" + key).digest())
        self._factor = next(self._pads)

    def seal(self, text: bytes) -> bytes:
        """Return the next message as it travels: `SEALED_HEADER`, text, 16 bytes of tag."""
        sealed = self._aead.encrypt(next(self._nonces), text, None)
        return SEALED_HEADER.pack(len(sealed), self._code(len(sealed))) + sealed

    def length(self, header: bytearray) -> int:
        """Return how many bytes of the next message follow its header; once for each. Raises as
        `open`.
        """
        num_bytes, code = SEALED_HEADER.unpack_from(header)
        if code != self._code(num_bytes):
            raise ValueError(ALTERED)
        return int(num_bytes)

    def open(self, sealed: bytes) -> bytes:
        """Return the text of the next message. Raises ValueError if it is not what the other end
        sealed.
        """
        try:
            return self._aead.decrypt(next(self._nonces), sealed, None)
        except InvalidTag:
            raise ValueError(ALTERED) from None

    def _code(self, num_bytes: int) -> int:
        return (num_bytes * self._factor + next(self._pads)) % _PRIME


def _pads(key: bytes) -> Iterator[int]:
    stream = BlockCipher(AES(key), CTR(bytes(16))).encryptor()
    while True:
        for (pad,) in _PAD.iter_unpack(stream.update(bytes(_PADS_BYTES))):
            yield pad
