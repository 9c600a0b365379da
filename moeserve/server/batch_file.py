"""The input and result files of a batch, and the loop that answers the lines.

The input file is in OpenAI's Batch format. Each line gets one line in a file of results.
`server/batches.py` and `moeserve run-batch` both use this.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from moeserve.errors import ConfigError

ID_PREFIX = "batch_req_"
_RESULT_PREFIX = b'{"id":"' + ID_PREFIX.encode()  # of each result line
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors and shells begin a file with it
_EXPECTED_LINE = '{"custom_id": "...", "method": "POST", "url": ..., "body": {...}}'
Url = Literal["/v1/chat/completions", "/v1/completions"]
URLS = get_args(Url)
Key = tuple[str, str | None]  # id and custom_id of a result line


class BatchLine(NamedTuple):
    """One line of the input file."""

    custom_id: str | None  # None if the line has no usable one
    number: int
    url: str = ""
    body: msgspec.Raw = msgspec.Raw(b"{}")
    fault: str | None = None  # why the line cannot be sent

    @property
    def key(self) -> Key:
        """The id and custom_id of the line's result."""
        name = f"line_{self.number}" if self.custom_id is None else self.custom_id
        return ID_PREFIX + name, self.custom_id

    def result(self, status: int, request_id: str | None, body: bytes) -> bytes:
        """Return the result line of an answer, good or bad. body: the answer's JSON."""
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
        return self._encode(response, None)

    def refusal(self) -> bytes:
        """Return the result line of a line that cannot be sent."""
        message = f"line {self.number}: {self.fault}"
        return self._encode(None, {"code": "invalid_request", "message": message})

    def _encode(self, response: Any, error: Any) -> bytes:
        line_id, custom_id = self.key
        line = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
        return msgspec.json.encode(line) + b"\n"


# ---- the input file


def read_input(path: Path) -> list[BatchLine]:
    """Return all lines that are not empty. The second line with one custom_id has a fault.

    Raise OSError.
    """
    lines: list[BatchLine] = []
    first_seen: dict[str, int] = {}
    for number, text in enumerate(_text_lines(path), 1):
        if number == 1:
            text = text.removeprefix(_BYTE_ORDER_MARK)
        if not text.strip():
            continue
        line = _parse(text, number)
        if line.custom_id is not None and first_seen.setdefault(line.custom_id, number) != number:
            first = first_seen[line.custom_id]
            fault = f"custom_id {line.custom_id!r:.64} is already on line {first}"
            line = BatchLine(None, number, fault=fault)
        lines.append(line)
    return lines


class _Line(msgspec.Struct):
    """A line before its fields are checked. Any type is accepted, so that a fault can name the
    line.
    """

    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    """The one field of a body that no batch can have."""

    stream: Any = None


def _parse(text: bytes, number: int) -> BatchLine:
    try:
        raw = msgspec.json.decode(text, type=_Line)
    except msgspec.ValidationError:
        return BatchLine(None, number, fault=f"expected {_EXPECTED_LINE}")
    except msgspec.MsgspecError as error:
        return BatchLine(None, number, fault=f"not JSON: {error}")
    if not isinstance(raw.custom_id, str) or not raw.custom_id:
        return BatchLine(None, number, fault=f"expected {_EXPECTED_LINE}")
    if raw.method != "POST":
        fault = f"method must be POST, got {raw.method!r:.64}"
    elif raw.url not in URLS:
        fault = f"url must be one of {', '.join(URLS)}, got {raw.url!r:.64}"
    elif not bytes(raw.body).startswith(b"{"):
        fault = "body must be an object"
    elif msgspec.json.decode(raw.body, type=_Body).stream:
        fault = "stream is not possible in a batch"
    else:
        return BatchLine(raw.custom_id, number, raw.url, raw.body)
    return BatchLine(raw.custom_id, number, fault=fault)


# ---- the files of results


class _Result(msgspec.Struct):
    """The fields that every result line has."""

    id: str
    custom_id: str | None
    response: msgspec.Raw
    error: msgspec.Raw


class ResultFile:
    """A file of results, to which whole lines are appended. It is created with the first one.

    All methods block. One thread at a time may use it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lines = 0  # those of earlier runs included
        self.size = 0  # bytes
        self._fd: int | None = None
        self._has_partial_line = False  # the last append failed in the middle

    def read(self) -> set[Key]:
        """Return the keys of the results of earlier runs. Cut off an unfinished last line.

        Raise OSError, and ConfigError if the file has other lines than results.
        """
        done_keys: set[Key] = set()
        size = 0
        if self.path.exists():
            for number, text in enumerate(_text_lines(self.path), 1):
                key = self._key_of(text, number)
                if key is None:
                    break
                done_keys.add(key)
                size += len(text)
            os.truncate(self.path, size)
        self.num_lines = len(done_keys)
        self.size = size
        return done_keys

    def _key_of(self, text: bytes, number: int) -> Key | None:
        """Return the key of a result line, None for one that an earlier run left unfinished."""
        what = f"{self.path}:{number} is no result line; is this the right output file?"
        if not text.endswith(b"\n"):
            if text[: len(_RESULT_PREFIX)] != _RESULT_PREFIX[: len(text)]:
                raise ConfigError(what)
            return None
        try:
            result = msgspec.json.decode(text, type=_Result)
        except msgspec.MsgspecError:
            raise ConfigError(what) from None
        return result.id, result.custom_id

    def open(self) -> None:
        """Create the file, or open it to append to it. Raise OSError."""
        if self._fd is None:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def append(self, line: bytes) -> None:
        """Add a line, all of it or nothing. Raise OSError."""
        self.open()
        assert self._fd is not None
        if self._has_partial_line:
            os.ftruncate(self._fd, self.size)
        unwritten = memoryview(line)
        self._has_partial_line = True
        while unwritten:
            unwritten = unwritten[os.write(self._fd, unwritten) :]
        self._has_partial_line = False
        self.size += len(line)
        self.num_lines += 1

    def close(self) -> None:
        """Close the file. Safe to repeat. Raise OSError."""
        if self._fd is not None:
            fd = self._fd
            self._fd = None
            try:
                if self._has_partial_line:
                    os.ftruncate(fd, self.size)
            finally:
                os.close(fd)


def _text_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


# ---- answering

Handle = Callable[[BatchLine], Awaitable[None]]


async def answer_lines(lines: Sequence[BatchLine], handle: Handle, max_concurrency: int) -> None:
    """Call `handle` once for each line, in order, with at most `max_concurrency` at a time.

    The first error cancels the others and is raised.
    """
    remaining = iter(lines)

    async def worker() -> None:
        for line in remaining:  # shared: each worker takes the next line that no other has
            await handle(line)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(max_concurrency, len(lines))):
                group.create_task(worker())
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
