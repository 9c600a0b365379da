"""Ask the hub what a repository has."""

import asyncio
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

from yarl import URL

from moeserve.actor.tasks import in_thread
from moeserve.errors import CheckpointError
from moeserve.hub.names import HubName, endpoint, is_inner_path
from moeserve.hub.units import one_line
from moeserve.version import __version__

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0  # for the whole listing
REQUEST_TIMEOUT_S = 15.0
MAX_FILES = 200_000  # of a repository
MAX_FILE_BYTES = 2**60
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_YES = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on the hub."""

    path: str  # in the repository
    size: int
    digest: str  # SHA-256 of the content; for small files Git's SHA-1. It names the file's blob.


@dataclass(frozen=True, slots=True)
class Repository:
    """A revision of a repository on the hub."""

    repo: str  # owner/name
    commit: str
    files: dict[str, RemoteFile]  # by path

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file, by path."""
        return {path: file.size for path, file in self.files.items()}


def is_offline() -> bool:
    """Return whether the environment forbids to ask the hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in _YES for name in names)


def token() -> str | None:
    """Return the user's token for the hub: HF_TOKEN, or that of `hf auth login`."""
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _YES:
        return None
    from huggingface_hub import get_token

    why = "the token of `hf auth login` cannot be read"
    unreadable = (OSError, UnicodeDecodeError)
    with CheckpointError.instead_of(unreadable, why, "; make it readable, or set HF_TOKEN"):
        found = get_token()
    if found and not (found.isascii() and found.isprintable()):
        raise CheckpointError("HF_TOKEN has characters that no token has; set it again")
    return found


async def list_files(name: HubName) -> Repository:
    """Return the revision of a repository that a name means. Raises CheckpointError."""
    hub = endpoint()
    key = await in_thread("token", token)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await in_thread("hub", lambda: _list_files(name, hub, key))
    except TimeoutError:
        raise unreachable(hub, f"no answer within {TIMEOUT_S:g} s") from None


def _list_files(name: HubName, hub: str, key: str | None) -> Repository:
    """Ask the hub. Blocks."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # Otherwise the library tells the hub which programs this one runs with.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    api = HfApi(
        endpoint=hub, token=key or False, library_name="moeserve", library_version=__version__
    )
    try:
        info = api.model_info(name.repo, revision=name.revision, timeout=REQUEST_TIMEOUT_S)
        return _repository(name.repo, str(info.sha), hub, key)
    except HFValidationError as error:
        raise CheckpointError(
            f"there is no directory {str(name)[:200]!r}, and no hub has a model of that name: "
            f"{str(error)[:300].rstrip('.')}; check the spelling"
        ) from None
    except GatedRepoError:
        raise no_access(name.repo, hub, key) from None
    except RepositoryNotFoundError:
        raise unknown_repository(name, hub, key) from None
    except RevisionNotFoundError:
        raise CheckpointError(
            f"{name.repo} has no revision {name.revision!r} on {hub}; see {hub}/{name.repo}/commits"
        ) from None
    except OfflineModeIsEnabled:
        raise offline(name) from None
    except HfHubHTTPError as error:
        raise refused(name.repo, hub, error.response, key) from None
    except CheckpointError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _no_hub(hub, error) from None
    except Exception as error:  # the library's HTTP client has no other base class for its errors
        raise unreachable(hub, str(error) or type(error).__name__) from None


def _repository(repo: str, commit: str, hub: str, key: str | None) -> Repository:
    """Return the files of a commit."""
    if not _COMMIT.fullmatch(commit):
        raise CheckpointError(f"{hub} gave {commit!r:.80} as the commit of {repo}, not a hash")
    entries = _entries(repo, commit, hub, key)
    files = [_checked(entry) for entry in entries if entry["type"] == "file"]
    return Repository(repo, commit, {file.path: file for file in files})


def _entries(repo: str, commit: str, hub: str, key: str | None) -> Iterator[Any]:
    """Yield the entries of a repository's listing, page by page.

    HfApi would send the token to whatever host the address of the next page names.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented there
        build_hf_headers,
        hf_raise_for_status,
        http_backoff,
    )

    page = f"{hub}/api/models/{repo}/tree/{commit}?recursive=true&expand=false"
    num_entries = 0
    while page:
        is_hub = URL(page).origin() == URL(hub).origin()
        headers = build_hf_headers(
            token=(key or False) if is_hub else False,
            library_name="moeserve",
            library_version=__version__,
        )
        response = http_backoff("GET", page, headers=headers, timeout=REQUEST_TIMEOUT_S)
        hf_raise_for_status(response)
        entries = response.json()
        num_entries += len(entries)
        if num_entries > MAX_FILES:
            raise CheckpointError(
                f"{repo} has more than {MAX_FILES} files, which no model has; check the spelling"
            )
        yield from entries
        following = response.links.get("next", {}).get("url")
        page = urljoin(page, following) if following and entries else ""


def _checked(entry: Any) -> RemoteFile:
    """Return a file of a listing. Raises CheckpointError for what cannot be true.

    Path and digest become names of files here.
    """
    path = entry["path"]
    lfs = entry.get("lfs")
    content = entry if lfs is None else lfs
    digest = content["oid"]
    size = content["size"]
    pattern = _SHA1 if lfs is None else _SHA256
    is_valid = (
        isinstance(path, str)
        and is_inner_path(path)
        and isinstance(digest, str)
        and pattern.fullmatch(digest) is not None
        and type(size) is int
        and 0 <= size <= MAX_FILE_BYTES
    )
    if not is_valid:
        shown_size = size if type(size) is not int or abs(size) <= MAX_FILE_BYTES else "too large"
        raise CheckpointError(
            f"the hub lists a file {path!r:.100} with digest {digest!r:.80} and size "
            f"{shown_size!r:.40}, which cannot be; nothing was downloaded"
        )
    return RemoteFile(path, size, digest)


def _no_hub(hub: str, error: Exception) -> CheckpointError:
    """Return the error about an answer that no hub gives, such as the page of a login."""
    why = f"{type(error).__name__}: {one_line(str(error))}"
    return CheckpointError(
        f"{hub} did not answer as a hub does ({why}); check "
        "HF_ENDPOINT, whether this network needs a login, and HTTPS_PROXY"
    )


def offline(name: HubName) -> CheckpointError:
    """Return the error about a model that is not here, while the hub must not be asked."""
    return CheckpointError(
        f"{name} has no complete copy in the cache, and HF_HUB_OFFLINE forbids to download it; "
        "unset HF_HUB_OFFLINE, or pass one of `moeserve list`"
    )


def unreachable(hub: str, why: str) -> CheckpointError:
    """Return the error about a hub that does not answer."""
    return CheckpointError(
        f"{hub} cannot be reached: {one_line(why)}; check the network and HTTPS_PROXY, set "
        "HF_ENDPOINT to a mirror, or pass a model that is here: `moeserve list`"
    )


def no_access(repo: str, hub: str, key: str | None) -> CheckpointError:
    """Return the error about a gated repository."""
    remedy = "set HF_TOKEN to a token of an account that has access"
    if key is not None:
        remedy = "the account of this token (HF_TOKEN) has no access yet"
    return CheckpointError(
        f"{repo} is gated: accept its conditions at {hub}/{repo}, then start again; {remedy}"
    )


def unknown_repository(name: HubName, hub: str, key: str | None) -> CheckpointError:
    """Return the error about a repository that does not exist, or is hidden from this user."""
    hidden = "the account of HF_TOKEN does not see it" if key else "set HF_TOKEN if it is private"
    return CheckpointError(
        f"there is no directory {str(name)!r}, and {hub} has no model {name.repo}; check the "
        f"spelling; {hidden}"
    )


def refused(repo: str, hub: str, response: Any, key: str | None) -> CheckpointError:
    """Return the error about an answer of the hub that is not expected."""
    status = response.status_code
    reason = one_line(response.headers.get("X-Error-Message") or response.reason_phrase)
    if status == 401 and key is not None:
        return CheckpointError(
            f"{hub} does not accept the token (HF_TOKEN, or that of `hf auth login`): {reason}; "
            "set another one, or none for public models"
        )
    return CheckpointError(f"{hub} answered {status} for {repo}: {reason}; try again later")
