"""Key files: API keys, or their SHA-256 digests, with names, rates and priorities.

A file whose name ends in .yaml, .yml or .json has a list `keys` of `KeyEntry`; any other one has a key, or
sha256:DIGEST, on each line.
"""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from moeserve.errors import ConfigError

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
Limit = Annotated[int, Meta(ge=1, le=2**53)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key. Exactly one of `key` and `sha256` is given. priority: of its requests, which may ask for a later place
    but not for an earlier one. name: in the access log; the first digits of the digest, if there is none."""

    name: Annotated[str, Meta(max_length=64, pattern=r"^[\w .@:-]*$")] = ""
    key: Annotated[str, Meta(min_length=1)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None

    @property
    def digest(self) -> bytes:
        """The key's SHA-256."""
        return bytes.fromhex(self.sha256) if self.sha256 is not None else digest_of(self.key or "")


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[KeyEntry], Meta(min_length=1)]


def digest_of(key: str) -> bytes:
    """Returns the SHA-256 of a key as it came in a header."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: str, flag: str) -> list[KeyEntry]:
    """Returns the keys of a file. Raises ConfigError that names the file and what is wrong, and shows no key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    structured = Path(path).suffix in (".yaml", ".yml", ".json")
    entries = _structured(text, f"{flag} {path}") if structured else _lines(text)
    if not entries:
        raise ConfigError(f"{flag} {path}: no key in it; one per line is expected")
    digests = [entry.digest for entry in entries]
    for number, digest in enumerate(digests):
        if (first := digests.index(digest)) < number:
            raise ConfigError(f"{flag} {path}: keys {first + 1} and {number + 1} are the same")
    return entries


def _lines(text: str) -> list[KeyEntry]:
    lines = [line.strip() for line in text.splitlines()]
    lines = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    hashed = [line.removeprefix("sha256:") for line in lines]
    pairs = zip(lines, hashed, strict=True)
    return [KeyEntry(sha256=x) if x != line and _DIGEST.fullmatch(x) else KeyEntry(key=line) for line, x in pairs]


def _structured(text: str, where: str) -> list[KeyEntry]:
    try:
        document: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the message itself would quote the line, and the key in it
        line = "" if mark is None else f" at line {mark.line + 1}"
        raise ConfigError(f"{where}: this is not valid YAML or JSON{line}") from None
    try:
        entries = msgspec.convert(document, _KeyFile).keys
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    for number, entry in enumerate(entries, 1):
        if (entry.key is None) == (entry.sha256 is None):
            raise ConfigError(f"{where}: key {number} needs exactly one of `key` and `sha256`")
    return entries
