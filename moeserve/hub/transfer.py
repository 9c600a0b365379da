"""Download one file of a repository into the cache, continuing after a break.

huggingface_hub begins a file again after its process was killed, because processes may share a
cache on file systems without locks. Here a file is continued: its content is compared with the
digest that the hub lists, so a file that several processes have written is found.
"""

import asyncio
import hashlib
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from moeserve.errors import CheckpointError
from moeserve.hub import listing
from moeserve.hub.listing import RemoteFile
from moeserve.hub.progress import DownloadMeter
from moeserve.hub.units import one_line, size_text
from moeserve.version import __version__

log = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
MAX_ANSWER_BYTES = 2**35  # the hub's CDN sends no answers of more than 50 GB
CONNECT_TIMEOUT_S = 15.0
READ_TIMEOUT_S = 30.0  # without a byte
MAX_ATTEMPTS = 5  # without a new byte
FIRST_PAUSE_S = 1.0  # between attempts; each further one is twice as long
MAX_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class Broken(Exception):
    """A transfer broke; it can be continued."""


class Discarded(Exception):
    """The bytes that are here are not those of the file, and were deleted."""


@dataclass(frozen=True, slots=True)
class Source:
    """The place from which files of a revision come."""

    hub: str  # address, without a slash at the end
    repo: str
    commit: str
    token: str | None

    def url(self, path: str) -> URL:
        """Return the address of a file."""
        return URL(f"{self.hub}/{self.repo}/resolve/{self.commit}/{quote(path)}", encoded=True)

    def headers(self, url: URL) -> dict[str, str]:
        """Return the headers for an address. Only the hub itself gets the token."""
        headers = {"User-Agent": f"moeserve/{__version__}", "Accept-Encoding": "identity"}
        if self.token is not None and self.is_hub(url):
            headers["Authorization"] = f"Bearer {self.token}"
        return headers

    def is_hub(self, url: URL) -> bool:
        """Return whether an address is one of the hub itself."""
        return url.origin() == URL(self.hub).origin()


def session() -> aiohttp.ClientSession:
    """Return a client for `fetch`."""
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S
    )
    return aiohttp.ClientSession(timeout=timeout, read_bufsize=CHUNK_BYTES)


async def fetch(
    client: aiohttp.ClientSession,
    source: Source,
    file: RemoteFile,
    blobs: Path,
    meter: DownloadMeter,
) -> None:
    """Download a file to `blobs`, under its digest. Continue what an earlier attempt has left.

    Raises CheckpointError if it cannot be had, OSError if it cannot be written.
    """
    part = part_of(blobs, file)
    num_failures = 0
    was_discarded = False
    while True:
        before = _size(part)
        try:
            await _continue(client, source, file, part, meter)
            break
        except Discarded as error:
            if was_discarded:
                raise CheckpointError(f"{source.repo}: {error}; try again later") from None
            was_discarded = True
            log.warning("%s: %s; it is downloaded again", source.repo, error)
        except (Broken, aiohttp.ClientError, TimeoutError) as error:
            num_failures = 1 if _size(part) > before else num_failures + 1
            why = _why(error)
            if num_failures >= MAX_ATTEMPTS:
                raise _given_up(source, file, part, why) from None
            pause_s = FIRST_PAUSE_S * 2 ** (num_failures - 1)
            log.warning("%s broke (%s); continuing in %g s", file.path, why, pause_s)
            await asyncio.sleep(pause_s)
    await asyncio.to_thread(os.replace, part, blobs / file.digest)


def _why(error: Exception) -> str:
    """Return why a transfer broke."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection broke"
    if isinstance(error, aiohttp.ClientHttpProxyError):  # its text has the proxy's password
        return f"the proxy answered {error.status} {one_line(error.message)}"
    if isinstance(error, TimeoutError):
        return f"no byte within {READ_TIMEOUT_S:g} s"
    return one_line(str(error)) or type(error).__name__


def part_of(blobs: Path, file: RemoteFile) -> Path:
    """Return the path of a file that is not complete yet."""
    return blobs / f"{file.digest}.incomplete"


def _given_up(source: Source, file: RemoteFile, part: Path, why: str) -> CheckpointError:
    kept = f"{size_text(_size(part))} of {size_text(file.size)} are kept"
    return CheckpointError(
        f"{source.repo}: {file.path} cannot be downloaded from {source.hub}: {why}; {kept}, and "
        "the next start continues there; check the network, or set HF_ENDPOINT to a mirror"
    )


async def _continue(
    client: aiohttp.ClientSession,
    source: Source,
    file: RemoteFile,
    part: Path,
    meter: DownloadMeter,
) -> None:
    """Append what is missing to `part`, and compare it with its digest."""
    with part.open("ab+") as out:
        digest = Digest(file)
        have = await asyncio.to_thread(digest.read, out)
        is_longer = have > file.size
        while have < file.size and not is_longer:
            end = min(file.size, have + MAX_ANSWER_BYTES)
            async with _response(client, source, file, have, end) as response:
                if _start_of(response, file, have) != have:  # the server ignores the range
                    out.truncate(0)
                    meter.add(-have)
                    digest = Digest(file)
                    have = 0
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    is_longer = have + len(chunk) > file.size
                    if is_longer:
                        break
                    await asyncio.to_thread(digest.write, out, chunk)
                    have += len(chunk)
                    meter.add(len(chunk))
            if have < end and not is_longer:
                raise Broken(f"it ended after {have} of {file.size} bytes")
        if is_longer or not digest.is_right():
            out.truncate(0)
            meter.add(-min(have, file.size))
            raise Discarded(f"{file.path} is not the file that the hub lists: its digest differs")
        await asyncio.to_thread(_sync, out)


def _sync(file: BinaryIO) -> None:
    """Wait until a file is on the disk. Otherwise a power cut could leave a file with holes."""
    file.flush()
    os.fsync(file.fileno())


class Digest:
    """The digest of a file while it is written: SHA-256, or that of a Git blob."""

    def __init__(self, file: RemoteFile) -> None:
        self._expected = file.digest
        if len(file.digest) == 64:
            self._hash: Any = hashlib.sha256()
        else:
            self._hash = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)

    def read(self, file: BinaryIO) -> int:
        """Add the content of a file, up to its end. Return the number of bytes."""
        file.seek(0)
        count = 0
        while chunk := file.read(8 * CHUNK_BYTES):
            self._hash.update(chunk)
            count += len(chunk)
        return count

    def write(self, file: BinaryIO, chunk: bytes) -> None:
        """Add bytes, and append them to a file."""
        file.write(chunk)
        self._hash.update(chunk)

    def is_right(self) -> bool:
        """Return whether the digest is the expected one."""
        return bool(self._hash.hexdigest() == self._expected)


@asynccontextmanager
async def _response(
    client: aiohttp.ClientSession, source: Source, file: RemoteFile, start: int, end: int
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer with a file's bytes from `start` up to `end`.

    Follows redirects itself, so that each address gets the headers that are meant for it.
    Raises Broken for what may be better later, CheckpointError for what will not.
    """
    url = source.url(file.path)
    for _ in range(MAX_REDIRECTS):
        headers = source.headers(url)
        if start or end < file.size:
            headers["Range"] = f"bytes={start}-{end - 1 if end < file.size else ''}"
        async with client.get(
            url, headers=headers, proxy=proxy_for(url), allow_redirects=False
        ) as response:
            location = response.headers.get("Location")
            if response.status in _REDIRECTS and location is not None:
                url = _redirected(source, file, url, location)
                continue
            if response.status in (200, 206):
                yield response
                return
            raise _failure(source, file, response)
    raise CheckpointError(
        f"{source.repo}: {file.path} is redirected more than {MAX_REDIRECTS} times by "
        f"{source.hub}; try again later, or set HF_ENDPOINT to a mirror"
    )


def proxy_for(url: URL) -> URL | None:
    """Return the proxy that the environment has for an address. Raises CheckpointError.

    aiohttp does the same with `trust_env`, but also sends passwords of ~/.netrc.
    """
    proxies = getproxies()
    address = proxies.get(url.scheme) or proxies.get("all")
    if not address or proxy_bypass(f"{url.host}:{url.port}"):
        return None
    try:
        proxy = URL(address if "://" in address else f"http://{address}")
        is_supported = proxy.scheme in ("http", "https") and bool(proxy.host) and bool(proxy.port)
    except ValueError:
        is_supported = False
    if not is_supported:  # not shown, as it may have a password
        raise CheckpointError(
            f"the proxy for {url.scheme} addresses in the environment is not an http:// or "
            f"https:// address; set {url.scheme.upper()}_PROXY, or NO_PROXY={url.host}"
        )
    return proxy


def _redirected(source: Source, file: RemoteFile, url: URL, location: str) -> URL:
    """Return the address to which an answer leads. Raises CheckpointError if that is no one."""
    try:
        target = url.join(URL(location, encoded=True))
        host = target.host or ""
        is_valid = target.scheme in ("http", "https") and bool(host.encode("idna"))
        is_valid = is_valid and target.port is not None
    except ValueError:
        is_valid = False
    if not is_valid:
        raise CheckpointError(
            f"{source.repo}: {file.path} is redirected by {source.hub} to {location[:200]!r}, "
            "which is no address of the web; try again later, or set HF_ENDPOINT to a mirror"
        )
    return target


def _failure(source: Source, file: RemoteFile, response: aiohttp.ClientResponse) -> Exception:
    """Return the error about an answer without the file."""
    status = response.status
    is_gated = response.headers.get("X-Error-Code") == "GatedRepo"
    is_refused = status in (401, 403) and source.token is None and source.is_hub(response.url)
    if is_gated or is_refused:
        return listing.no_access(source.repo, source.hub, source.token)
    if status in (408, 416, 425, 429) or status >= 500:
        return Broken(f"the server answered {status} {response.reason}")
    reason = one_line(response.headers.get("X-Error-Message") or response.reason or "")
    return CheckpointError(
        f"{source.repo}: {response.url.host} answered {status} for {file.path}: {reason}; check "
        "HF_TOKEN, or try again later"
    )


def _start_of(response: aiohttp.ClientResponse, file: RemoteFile, asked: int) -> int:
    """Return the position of the first byte of an answer.

    Raises Broken for an answer with something else, such as the page of a login: what is here
    already must not be given up for that.
    """
    host = response.url.host
    if response.status == 200:
        length = None if "Content-Encoding" in response.headers else response.content_length
        is_page = length is None and response.content_type == "text/html"
        if is_page or length not in (None, file.size):
            raise Broken(
                f"{host} answered with {'a page' if is_page else f'{length} bytes'} of type "
                f"{response.content_type}, not with the {file.size} bytes that the hub lists"
            )
        return 0
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None or int(match[1]) != asked:
        raise Broken(f"{host} answered with another range than the one asked for")
    if match[2] not in ("*", str(file.size)):
        raise Broken(f"{host} has {match[2]} bytes, not the {file.size} that the hub lists")
    return asked


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
