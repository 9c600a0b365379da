"""The name of a model on a hub: owner/name, with a path, a revision and a quantization.

| written | meaning |
|---|---|
| owner/name | the repository's main branch |
| owner/name@REVISION | a branch, a tag or a commit |
| owner/name:Q4_K_M | its GGUF model with this quantization |
| owner/name/PATH | a folder or a file in it |
| hf.co/owner/name..., https://huggingface.co/owner/name... | the same |
| https://huggingface.co/owner/name/tree/REVISION/PATH | that; also blob, resolve and raw |
"""

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from moeserve.errors import CheckpointError

MAIN = "main"
DEFAULT_ENDPOINT = "https://huggingface.co"
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_REPO = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_NAME = re.compile(
    rf"(?P<repo>{_REPO})(?P<path>(?:/[\w.+-]+)*)"
    r"(?:@(?P<revision>[\w.+/-]+))?(?::(?P<quant>[\w.-]+))?"
)
_QUANT = re.compile(r"(?P<rest>.*):(?P<quant>[\w.-]+)")
_PAGES = ("tree", "blob", "resolve", "raw")  # of a repository, in addresses
_REFS = re.compile(r"(refs/(?:pr|convert)/[^/]+)(?:/|$)")  # revisions with slashes
# Control characters, backslashes, and surrogates, which no file's name can hold.
_UNUSABLE = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
_NO_TAG = "latest"  # added by Ollama's users and clients to names without a tag


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on a hub."""

    repo: str  # owner/name
    path: str = ""  # of a folder or a file in the repository
    revision: str = MAIN
    quant: str = ""  # quantization of a GGUF model

    def __str__(self) -> str:
        path = f"/{self.path}" if self.path else ""
        revision = f"@{self.revision}" if self.revision != MAIN else ""
        quant = f":{self.quant}" if self.quant else ""
        return f"{self.repo}{path}{revision}{quant}"


def endpoint() -> str:
    """Return the address of the hub, without a slash at its end: HF_ENDPOINT, or huggingface.co."""
    address = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    with CheckpointError.instead_of(ValueError, "HF_ENDPOINT is not an address"):
        parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CheckpointError(
            f"HF_ENDPOINT is {address!r}; expected an address such as {DEFAULT_ENDPOINT}"
        )
    if "@" in parts.netloc:  # it would appear in messages, and take the place of the token
        raise CheckpointError(
            f"HF_ENDPOINT has a user's name or password before {parts.hostname!r}; remove it, and "
            "set HF_TOKEN to the hub's token"
        )
    return address


def parse_hub_name(text: str) -> HubName | None:
    """Return the model that a name or an address means, or None if the text is neither.

    Raises CheckpointError for an address that is not one of a model on the hub.
    """
    address = _path_in_address(text)
    if address is not None:
        return _from_address(text, address)
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    return _checked(
        HubName(
            repo=match["repo"],
            path=match["path"].lstrip("/"),
            revision=match["revision"] or MAIN,
            quant=_tag(match["quant"]),
        )
    )


def _path_in_address(text: str) -> str | None:
    """Return what follows the hub's host in an address; None if the text is no address."""
    has_scheme = text.lower().startswith(("http://", "https://"))
    if not has_scheme and text.partition("/")[0].lower() not in _HOSTS:
        return None
    with CheckpointError.instead_of(ValueError, f"{text[:200]!r} is not an address"):
        given = urlsplit(text if has_scheme else f"https://{text}")
        own = urlsplit(endpoint())
        is_own_host = given.netloc.lower() == own.netloc.lower()
    own_path = own.path.rstrip("/")
    if is_own_host and given.path.startswith(f"{own_path}/"):
        return given.path.removeprefix(own_path).strip("/")
    if (given.hostname or "").lower() in _HOSTS:
        return given.path.strip("/")
    raise CheckpointError(
        f"{text[:200]!r} is not an address of {endpoint()}; pass the model's owner/name, and the "
        "address of another hub in HF_ENDPOINT"
    )


def _from_address(text: str, path: str) -> HubName | None:
    """Return the model of an address, or None if its path leads out of the repository.

    path: what follows the host, percent-encoded.
    """
    quant = ""
    if tagged := _QUANT.fullmatch(path):
        path = tagged["rest"]
        quant = _tag(tagged["quant"])
    segments = path.split("/")
    last = segments[1] if len(segments) > 1 else ""
    repo = f"{segments[0]}/{last.partition('@')[0].removesuffix('.git')}"
    revision = unquote(last.partition("@")[2]) or MAIN
    inner = segments[2:]
    is_page = bool(inner) and inner[0] in _PAGES
    if not re.fullmatch(_REPO, repo) or (inner and not is_page):
        raise CheckpointError(
            f"{text[:200]!r} is not the address of a model, which looks like "
            f"{DEFAULT_ENDPOINT}/owner/name or {DEFAULT_ENDPOINT}/owner/name/blob/main/FILE"
        )
    rest = "/".join(inner[1:])
    if rest:
        refs = _REFS.match(rest)
        revision = refs[1] if refs else inner[1]
        rest = rest[len(revision) :].strip("/")
    return _checked(HubName(repo=repo, path=unquote(rest), revision=unquote(revision), quant=quant))


def _tag(text: str | None) -> str:
    """Return the quantization that a tag names; "" for none, and for Ollama's `latest`."""
    return "" if text is None or text.lower() == _NO_TAG else text


def _checked(name: HubName) -> HubName | None:
    """Return a name whose path and revision stay inside of the repository, otherwise None."""
    for part in (name.path, name.revision):
        if part and not is_inner_path(part):
            return None
    owner, _, model = name.repo.partition("/")
    return None if {owner, model} & {".", ".."} or ".." in name.repo else name


def is_inner_path(path: str) -> bool:
    """Return whether a relative path stays inside of its folder, and can be shown in a line."""
    is_usable = _UNUSABLE.search(path) is None
    return is_usable and not any(part in ("", ".", "..") for part in path.split("/"))
