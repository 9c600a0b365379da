"""The server's key: signs receipts (Ed25519, by the package `cryptography`), and checks signatures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from moeserve.errors import ConfigError
from moeserve.receipts import Receipt, signed_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MAKE = "`moeserve receipt-key FILE` makes one"


class Signer:
    """A private key, from a PEM file. Raises ConfigError."""

    def __init__(self, path: str) -> None:
        _need_package()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(Path(path).expanduser().read_bytes(), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a password
            raise ConfigError(f"--receipt-key {path} is no private key that can be read: {error}; {_MAKE}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"--receipt-key {path} is no Ed25519 key; {_MAKE}")
        self._key = key
        self.public_key = _public(key)

    def signed(self, receipt: Receipt) -> Receipt:
        """Returns the receipt with public key and signature."""
        receipt = replace(receipt, public_key=self.public_key)
        return replace(receipt, signature=self._key.sign(signed_bytes(receipt)).hex())


def make_key(path: Path) -> str:
    """Writes a new private key, for its owner only, and returns its public key. Raises ConfigError."""
    _need_package()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists; a key is never overwritten: choose another name") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return _public(key)


def is_signed(receipt: Receipt) -> bool:
    """Whether the receipt's signature is its public key's, and of this receipt. Raises ConfigError without the package."""
    _need_package()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(receipt.public_key))
        key.verify(bytes.fromhex(receipt.signature), signed_bytes(receipt))
    except (ValueError, InvalidSignature):
        return False
    return True


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def _need_package() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError("receipts need the package cryptography: pip install 'moeserve[receipts]'") from None
