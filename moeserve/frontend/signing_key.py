"""Sign receipts with the server's Ed25519 key, and check signatures."""

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec.structs import replace

from moeserve.errors import ConfigError
from moeserve.receipts import Receipt, signed_bytes


class SigningKey:
    """A private key, from a PEM file. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        # TypeError: the key has a password
        kinds = (OSError, ValueError, TypeError, UnsupportedAlgorithm)
        with ConfigError.instead_of(
            kinds, f"receipt_key {path}", "; `moeserve receipt-key FILE` creates a key"
        ):
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(
                f"receipt_key {path} is not an Ed25519 key; `moeserve receipt-key FILE` creates one"
            )
        self._key = key
        self.public_key = key.public_key().public_bytes_raw().hex()

    def signed(self, receipt: Receipt) -> Receipt:
        """Return the receipt with public key and signature."""
        receipt = replace(receipt, public_key=self.public_key)
        return replace(receipt, signature=self._key.sign(signed_bytes(receipt)).hex())


def make_key(path: Path) -> str:
    """Write a new private key to a file that only its owner can read. Return the public key.

    Raises ConfigError.
    """
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    text = Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, *form)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    remedy = "; choose the name of a new file"
    with (
        ConfigError.instead_of(OSError, path, remedy),
        open(os.open(path, flags, 0o600), "wb") as file,
    ):
        file.write(text)
    return SigningKey(path).public_key


def is_signed(receipt: Receipt) -> bool:
    """Return whether the receipt's signature is valid for its public key."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(receipt.public_key))
        key.verify(bytes.fromhex(receipt.signature), signed_bytes(receipt))
    except (ValueError, InvalidSignature):
        return False
    return True
