"""Server-sent events from a byte stream, as the HTML standard defines them, fed in pieces of any size."""

from __future__ import annotations

MAX_EVENT_BYTES = 64 * 2**20


class SSEParser:
    """Feed bytes, get the data of every event that became complete.

    Works on bytes, so that a character split over two pieces needs no care. Line ends may be LF, CRLF or CR; comments
    and fields other than `data` are skipped; several `data` lines of one event are joined by LF. An event that the
    stream's end cuts off is never returned.
    """

    def __init__(self) -> None:
        self._tail = b""  # a line without its end
        self._data: list[bytes] = []
        self._size = 0
        self._skip_lf = False  # the last piece ended in CR: a LF that follows belongs to it
        self._first = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that `piece` completes. Raises ValueError if one grows beyond 64 MiB."""
        if self._skip_lf and piece:
            self._skip_lf = False
            piece = piece.removeprefix(b"\n")
        text = self._tail + piece
        if self._first and len(text) >= 3:
            self._first = False
            text = text.removeprefix(b"\xef\xbb\xbf")
        if b"\r" in text:
            self._skip_lf = text.endswith(b"\r")
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = text.split(b"\n")
        self._tail = lines.pop()
        if len(self._tail) + self._size > MAX_EVENT_BYTES:
            raise ValueError(f"an event of the stream is larger than {MAX_EVENT_BYTES} bytes")
        return self._events(lines)

    def _events(self, lines: list[bytes]) -> list[bytes]:
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data, self._size = [], 0
            elif line.startswith(b"data:"):
                value = line[6:] if line.startswith(b" ", 5) else line[5:]
                self._data.append(value)
                self._size += len(value)
            elif line == b"data":
                self._data.append(b"")
        return events
