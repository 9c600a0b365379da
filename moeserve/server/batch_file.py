"""The two files of a batch: OpenAI Batch lines in, result lines out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

import msgspec

from moeserve.errors import ConfigError

ID_PREFIX = "batch_req_"
_BEGINNING = (
    b'{"id":"' + ID_PREFIX.encode()
)  # of each result line, also of one that an earlier run left unfinished
Url = Literal["/v1/chat/completions", "/v1/completions"]
URLS = get_args(Url)
Key = tuple[str, str | None]  # id and custom_id of a result line


class BatchLine(NamedTuple):
    """One line of the input file. `fault` says why it cannot be sent; without a usable custom_id
    that is None.
    """

    custom_id: str | None
    number: int
    url: str = ""
    body: msgspec.Raw = msgspec.Raw(b"{}")
    fault: str | None = None

    @property
    def key(self) -> Key:
        """The id and custom_id of the line's result."""
        return ID_PREFIX + (
            f"line_{self.number}" if self.custom_id is None else self.custom_id
        ), self.custom_id

    def result(self, status: int, request_id: str | None, body: bytes) -> bytes:
        """Returns the result line of a server's answer, success or not; `body` is its JSON."""
        return self._encode(
            {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}, None
        )

    def refusal(self, code: str = "invalid_request", why: str | None = None) -> bytes:
        """Returns the result line of a line that was never sent."""
        return self._encode(
            None, {"code": code, "message": f"line {self.number}: {why or self.fault}"}
        )

    def _encode(self, response: Any, error: Any) -> bytes:
        line_id, custom_id = self.key
        line = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
        return msgspec.json.encode(line) + b"\n"


def read_input(path: Path) -> list[BatchLine]:
    """Returns all lines but empty ones. The second line with the same custom_id is a fault."""
    lines: list[BatchLine] = []
    first_seen: dict[str, int] = {}
    for number, text in enumerate(_text_lines(path), 1):
        if not text.strip():
            continue
        line = _parse(text, number)
        if line.custom_id is not None and first_seen.setdefault(line.custom_id, number) != number:
            first = first_seen[line.custom_id]
            line = BatchLine(
                None, number, fault=f"custom_id {line.custom_id!r:.64} is already on line {first}"
            )
        lines.append(line)
    return lines


class _Line(msgspec.Struct):
    """A line as it should be; the fields are checked one by one, so that a fault names the line's
    custom_id.
    """

    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    """The field of a body that no batch can have."""

    stream: Any = None


def _parse(text: bytes, number: int) -> BatchLine:
    expected = '{"custom_id": "...", "method": "POST", "url": ..., "body": {...}}'
    try:
        raw = msgspec.json.decode(text, type=_Line)
    except msgspec.ValidationError:
        return BatchLine(None, number, fault=f"expected {expected}")
    except msgspec.MsgspecError as error:
        return BatchLine(None, number, fault=f"not JSON: {error}")
    if not isinstance(raw.custom_id, str) or not raw.custom_id:
        return BatchLine(None, number, fault=f"expected {expected}")
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


class _Result(msgspec.Struct):
    """The fields that every result line has."""

    id: str
    custom_id: str | None
    response: msgspec.Raw
    error: msgspec.Raw


def open_output(path: Path) -> BinaryIO:
    """Opens the output file to append results. Raises ConfigError."""
    with ConfigError.instead_of(OSError, f"cannot write {path}"):
        return path.open("ab")


def read_done(path: Path) -> set[Key]:
    """Returns the keys of the results in the output file; cuts off a last line that an earlier run
    left unfinished.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no directory {path.parent}")
    if not path.exists():
        return set()
    done: set[Key] = set()
    good_bytes = 0
    for number, text in enumerate(_text_lines(path), 1):
        strange = ConfigError(f"{path}:{number} is no result line; is this the right output file?")
        if not text.endswith(b"\n"):
            if text[: len(_BEGINNING)] != _BEGINNING[: len(text)]:
                raise strange
            break
        try:
            found = msgspec.json.decode(text, type=_Result)
        except msgspec.MsgspecError:
            raise strange from None
        done.add((found.id, found.custom_id))
        good_bytes += len(text)
    with path.open("r+b") as file:
        file.truncate(good_bytes)
    return done


def _text_lines(path: Path) -> Iterator[bytes]:
    with ConfigError.instead_of(OSError, f"cannot read {path}"), path.open("rb") as file:
        yield from file
