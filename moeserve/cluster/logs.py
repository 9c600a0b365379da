"""Logging of all moeserve processes: one line per record on stderr, as text or JSON."""

import logging
import sys
import time
from typing import Literal

import msgspec

from moeserve.actor.process import one_line

# Loggers of libraries that write a line for each request at INFO (huggingface_hub's HTTP client)
_TALKATIVE = ("httpx", "httpx2")


def set_up_logging(level: str = "info", format: Literal["text", "json"] = "text") -> None:
    """Replace the root logger's handlers.

    Control characters are escaped, so that a prompt cannot forge a log line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLine() if format == "json" else _TextLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    of_libraries = root.level
    if of_libraries == logging.INFO:
        of_libraries = logging.WARNING
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(of_libraries)


class _TextLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time_of_day = time.strftime("%H:%M:%S", time.localtime(record.created))
        source = record.name.removeprefix("moeserve.")
        lines = [
            f"{time_of_day}.{int(record.msecs):03d} {record.levelname:<7} {source}:"
            f" {one_line(record.getMessage())}"
        ]
        lines += [f"    {one_line(line)}" for line in _traceback_lines(self, record)]
        return "\n".join(lines)


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if traceback := _traceback_lines(self, record):
            line["trace"] = "\n".join(traceback)
        return msgspec.json.encode(line).decode()


def _traceback_lines(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    return formatter.formatException(record.exc_info).splitlines() if record.exc_info else []
