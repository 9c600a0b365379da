"""Encryption of one direction of a stream between machines: AES-256-GCM.

A message's nonce is its number in the stream. Both ends know it, so it does not travel, and what was altered, repeated,
left out or put in does not open.
"""

from __future__ import annotations

from itertools import count

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES = 12


class Cipher:
    """Seals the messages of one direction at one end, or opens them at the other. key: 32 bytes, of no other stream."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._nonces = (number.to_bytes(NONCE_BYTES, "big") for number in count())

    def seal(self, text: bytes) -> bytes:
        """Returns the next message as it travels, 16 bytes longer."""
        return self._aead.encrypt(next(self._nonces), text, None)

    def open(self, sealed: bytes) -> bytes:
        """Returns the text of the next message. Raises ValueError if it is not what the other end sealed."""
        try:
            return self._aead.decrypt(next(self._nonces), sealed, None)
        except InvalidTag:
            raise ValueError("a message that was altered on the way, or is not its own") from None
