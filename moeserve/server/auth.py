"""API keys: the files that hold them, the caller of a request, and the rates of a key.

Rates are requests and tokens a minute, with OpenAI's headers and errors.
"""

import hashlib
import hmac
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, RateLimited, Unauthorized

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
Limit = Annotated[int, Meta(ge=1, le=2**53)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key of a key file. It has either `key` or `sha256`."""

    # Shown in the access log; by default the first digits of the digest.
    name: Annotated[str, Meta(max_length=64, pattern=r"^[\w .@:-]*$")] = ""
    key: Annotated[str, Meta(min_length=1)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    # The earliest priority of its requests; they may ask for a later one.
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None

    @property
    def digest(self) -> bytes:
        """The key's SHA-256."""
        return bytes.fromhex(self.sha256) if self.sha256 is not None else digest_of(self.key or "")


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[KeyEntry], Meta(min_length=1)]


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, as sent in a header."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: str, flag: str) -> list[KeyEntry]:
    """Return the keys of a file.

    A .yaml, .yml or .json file has a list `keys`. In any other file each line is a key or
    sha256:DIGEST. Raise ConfigError, which names the file and the fault, and shows no key.
    """
    with ConfigError.instead_of((OSError, UnicodeDecodeError), f"{flag} {path}"):
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    if Path(path).suffix in (".yaml", ".yml", ".json"):
        entries = _read_document(text, f"{flag} {path}")
    else:
        entries = _read_lines(text)
    if not entries:
        raise ConfigError(f"{flag} {path}: no key in it; one per line is expected")
    digests = [entry.digest for entry in entries]
    for number, digest in enumerate(digests):
        if (first := digests.index(digest)) < number:
            raise ConfigError(f"{flag} {path}: keys {first + 1} and {number + 1} are the same")
    return entries


def _read_lines(text: str) -> list[KeyEntry]:
    lines = [line.strip() for line in text.splitlines()]
    lines = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    entries = []
    for line in lines:
        digest = line.removeprefix("sha256:")
        if digest != line and _DIGEST.fullmatch(digest):
            entries.append(KeyEntry(sha256=digest))
        else:
            entries.append(KeyEntry(key=line))
    return entries


def _read_document(text: str, where: str) -> list[KeyEntry]:
    try:
        document: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        # The message itself would quote the line, and the key in it.
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" at line {mark.line + 1}"
        raise ConfigError(f"{where}: this is not valid YAML or JSON{line}") from None
    with ConfigError.instead_of(msgspec.ValidationError, where):
        entries = msgspec.convert(document, _KeyFile).keys
    for number, entry in enumerate(entries, 1):
        if (entry.key is None) == (entry.sha256 is None):
            raise ConfigError(f"{where}: key {number} needs exactly one of `key` and `sha256`")
    return entries


@dataclass
class Bucket:
    """A token bucket for a limit per minute. It refills steadily, up to one minute's worth.

    Answers are charged when their length is known, so `num_left` may fall below zero. Requests are
    then refused until it is above.
    """

    per_minute: int
    num_left: float = field(init=False)
    _refilled_at_s: float = field(default_factory=monotonic, init=False)

    def __post_init__(self) -> None:
        self.num_left = float(self.per_minute)

    def refill(self) -> None:
        """Add the share of the time since the last call."""
        now = monotonic()
        self.num_left = min(
            self.per_minute, self.num_left + (now - self._refilled_at_s) * self.per_minute / 60
        )
        self._refilled_at_s = now

    def seconds_until(self, amount: float) -> float:
        """Return the seconds until `amount` is available; 0 if it is now."""
        return max(0.0, amount - self.num_left) * 60 / self.per_minute


class Rates:
    """The rate limits of one key, and their use. None: no limit of that kind."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        self.limits = requests_per_minute, tokens_per_minute
        limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._buckets = {kind: Bucket(limit) for kind, limit in limits.items() if limit is not None}

    def charge_prompt(self, num_tokens: int) -> None:
        """Charge a request and its prompt. Raise RateLimited without charging anything."""
        amounts = {"requests": 1, "tokens": num_tokens}
        for kind, bucket in self._buckets.items():
            bucket.refill()
            amount = amounts[kind]
            limit = bucket.per_minute
            if amount > limit:
                what = (
                    f"the prompts have {amount} tokens and this key may use {limit} a minute: "
                    "send less at once"
                )
                raise RateLimited(what, kind=kind, retry_after_s=math.inf)
            if (wait_s := bucket.seconds_until(amount)) > 0:
                what = (
                    f"this key may use {limit} {kind} a minute; try again in {math.ceil(wait_s)} s"
                )
                raise RateLimited(what, kind=kind, retry_after_s=wait_s)
        for kind, bucket in self._buckets.items():
            bucket.num_left -= amounts[kind]

    def charge_answer(self, num_tokens: int) -> None:
        """Charge the tokens of an answer."""
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.refill()
            bucket.num_left -= num_tokens

    def headers(self) -> dict[str, str]:
        """Return OpenAI's headers: limits, remaining amounts, and the time until they are full."""
        headers = {}
        for kind, bucket in self._buckets.items():
            bucket.refill()
            num_left = max(0, math.floor(bucket.num_left))
            reset_s = bucket.seconds_until(bucket.per_minute)
            headers[f"X-RateLimit-Limit-{kind.title()}"] = str(bucket.per_minute)
            headers[f"X-RateLimit-Remaining-{kind.title()}"] = str(num_left)
            headers[f"X-RateLimit-Reset-{kind.title()}"] = _duration(reset_s)
        return headers


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    owner: str = ""  # names the key without revealing it; "" without a key
    is_admin: bool = False
    name: str = ""  # of the owner, for people
    rate_limits: Rates | None = None
    priority: int | None = None


OPEN = Caller()


@dataclass(frozen=True)
class Keys:
    """The keys of a server at one time."""

    callers: Mapping[bytes, Caller] = field(default_factory=dict)  # by the digests of their keys
    num_users: int = 0
    num_admins: int = 0


class Auth:
    """The server's keys.

    With user keys every route but the probes needs one; without, the server is open.

    Keys are kept and compared as SHA-256 digests. Each check compares all of them, so timing
    reveals nothing.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Raise ConfigError for a key file that cannot be read or holds no key."""
        self._config = config
        self.paths = [
            path for path in (config.api_key_file, config.admin_key_file) if path is not None
        ]
        if not all(config.api_key):
            raise ConfigError("--api-key: an empty key protects nothing")
        self._keys = Keys()
        self.use(self.read())

    def read(self) -> Keys:
        """Read the key files; blocks. Raise ConfigError.

        A key that was known before keeps its rates, and what it has used of them, while its limits
        are the same.
        """
        config = self._config
        users: Sequence[KeyEntry] = [KeyEntry(key=key) for key in dict.fromkeys(config.api_key)]
        admins: Sequence[KeyEntry] = []
        if config.api_key_file is not None:
            users = [*users, *read_keys(config.api_key_file, "--api-key-file")]
        if config.admin_key_file is not None:
            admins = read_keys(config.admin_key_file, "--admin-key-file")
        known = self._keys.callers
        callers = {entry.digest: _make_caller(entry, known, is_admin=False) for entry in users}
        callers |= {entry.digest: _make_caller(entry, known, is_admin=True) for entry in admins}
        return Keys(callers, len(users), len(admins))

    def use(self, keys: Keys) -> None:
        """Use these keys from now on, all at once."""
        self._keys = keys

    @property
    def required(self) -> bool:
        """Whether every route but the probes needs a key."""
        return self._keys.num_users > 0

    @property
    def has_admins(self) -> bool:
        """Whether there are administrators' keys."""
        return self._keys.num_admins > 0

    @property
    def has_keys(self) -> bool:
        """Whether there is any key."""
        return bool(self._keys.callers)

    @property
    def several_owners(self) -> bool:
        """Whether the requests of several keys must be kept apart."""
        return self._keys.num_users > 1

    def find_caller(self, name: str, name_of: Callable[[str], str]) -> Caller | None:
        """Return the caller whose owner `name_of` maps to `name`. None if its key was removed."""
        known = [OPEN, *self._keys.callers.values()]
        return next((caller for caller in known if name_of(caller.owner) == name), None)

    def check(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller. Raise Unauthorized for a wrong key, or a missing one if one is needed.

        A key in either header is enough, whatever the other one has: SDKs always send a bearer.
        """
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            bearer = ""
        for key in (bearer.strip(), headers.get("X-Api-Key", "").strip()):
            if (caller := self._caller_of_key(key)) is not None:
                return caller
        if not self.required:
            return OPEN
        raise Unauthorized(
            "missing or wrong API key; send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"
        )

    def _caller_of_key(self, key: str) -> Caller | None:
        digest = digest_of(key)
        callers = self._keys.callers.items()
        # A list, not `next`, so that all digests are compared.
        matching = [caller for known, caller in callers if hmac.compare_digest(known, digest)]
        return matching[0] if matching else None


def _make_caller(entry: KeyEntry, known: Mapping[bytes, Caller], *, is_admin: bool) -> Caller:
    """Return the caller of a key. known: the callers so far, whose rates continue."""
    owner = entry.digest.hex()[:16]
    limits = entry.requests_per_minute, entry.tokens_per_minute
    known_caller = known.get(entry.digest)
    rates = None
    if any(limits):
        rates = known_caller.rate_limits if known_caller is not None else None
        if rates is None or rates.limits != limits:
            rates = Rates(*limits)
    return Caller(
        owner=owner,
        is_admin=is_admin,
        name=entry.name or owner,
        rate_limits=rates,
        priority=entry.priority,
    )


def _duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: 250ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
