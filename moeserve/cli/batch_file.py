"""The two files of run-batch: OpenAI Batch lines in, result lines out. Local files only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from moeserve.errors import ConfigError

ID_PREFIX = "batch_req_"
_BEGINNING = b'{"id":"' + ID_PREFIX.encode()  # of each result line, also of one that an earlier run left unfinished
URLS = ("/v1/chat/completions", "/v1/completions")


class BatchLine(msgspec.Struct):
    """One request of the input file. `fault` says why it cannot be sent."""

    custom_id: str
    method: str = "POST"
    url: str = ""
    body: dict[str, Any] = {}
    fault: str | None = None


def read_input(path: Path) -> list[BatchLine]:
    """All lines. Raises ConfigError if one has no custom_id, or the same as another: its answer would have no name."""
    lines: list[BatchLine] = []
    first_seen: dict[str, int] = {}
    for number, text in enumerate(_text_lines(path), 1):
        if not text.strip():
            continue
        line = _parse(text, f"{path}:{number}")
        if line.custom_id in first_seen:
            raise ConfigError(
                f"{path}:{number}: custom_id {line.custom_id!r:.64} is already on line {first_seen[line.custom_id]}"
            )
        first_seen[line.custom_id] = number
        lines.append(line)
    return lines


def _parse(text: bytes, where: str) -> BatchLine:
    try:
        raw = msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    custom_id = raw.get("custom_id") if isinstance(raw, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        raise ConfigError(f'{where}: expected {{"custom_id": "...", "method": "POST", "url": ..., "body": {{...}}}}')
    method, url, body = raw.get("method", "POST"), raw.get("url"), raw.get("body")
    if method != "POST":
        return BatchLine(custom_id, fault=f"method must be POST, got {method!r:.64}")
    if url not in URLS:
        return BatchLine(custom_id, fault=f"url must be one of {', '.join(URLS)}, got {url!r:.64}")
    if not isinstance(body, dict):
        return BatchLine(custom_id, fault="body must be an object")
    if body.get("stream"):
        return BatchLine(custom_id, fault="stream is not possible in a batch")
    return BatchLine(custom_id, method, url, body)


class _Result(msgspec.Struct):
    """A line that we wrote, as far as it matters here."""

    id: str
    custom_id: str
    response: msgspec.Raw
    error: msgspec.Raw


def open_output(path: Path) -> BinaryIO:
    """For adding results at its end. Raises ConfigError."""
    try:
        return path.open("ab")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_done(path: Path) -> set[str]:
    """custom_ids that the output file already answers. A last line that an earlier run left unfinished is cut off."""
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no directory {path.parent}")
    if not path.exists():
        return set()
    done: set[str] = set()
    good_bytes = 0
    for number, text in enumerate(_text_lines(path), 1):
        strange = ConfigError(f"{path}:{number} is no result line; is this the right output file?")
        if not text.endswith(b"\n"):
            if text[: len(_BEGINNING)] != _BEGINNING[: len(text)]:
                raise strange
            break
        try:
            done.add(msgspec.json.decode(text, type=_Result).custom_id)
        except msgspec.MsgspecError:
            raise strange from None
        good_bytes += len(text)
    with path.open("r+b") as file:
        file.truncate(good_bytes)
    return done


def result_line(custom_id: str, status: int, request_id: str | None, body: bytes) -> bytes:
    """An answer of the server, success or not; `body` is its JSON."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _encode(custom_id, response, None)


def fault_line(custom_id: str, code: str, message: str) -> bytes:
    """A line that was never sent."""
    return _encode(custom_id, None, {"code": code, "message": message})


def _encode(custom_id: str, response: Any, error: Any) -> bytes:
    line = {"id": ID_PREFIX + custom_id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def _text_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
