"""Log lines: one record, one line, whatever is in the message."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from moeserve.cluster.logs import set_up_logging


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    yield
    logger.handlers[:], level = before
    logger.setLevel(level)


def test_a_prompt_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "text")
    logging.getLogger("moeserve.server").warning(
        "prompt: %s", "hi\n12:00:00 ERROR all is lost\x1b[31m"
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING server: prompt: hi\\x0a12:00:00 ERROR all is lost\\x1b[31m")


def test_levels_apply_and_traces_are_indented(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("error", "text")
    logging.getLogger("moeserve.x").warning("unseen")
    try:
        raise ValueError("no\nend")
    except ValueError:
        logging.getLogger("moeserve.x").exception("failed")
    first, *trace = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR   x: failed")
    assert trace[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") for line in trace)
    assert trace[-2:] == ["    ValueError: no", "    end"]


def test_json_lines_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("moeserve.x").exception("a\nb")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert (record["level"], record["logger"], record["message"]) == ("error", "moeserve.x", "a\nb")
    assert record["trace"].endswith("ValueError: no")


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", ["INFO", "WARNING"]), ("info", ["WARNING"]), ("error", [])],
)
def test_requests_of_a_library_are_shown_at_debug_only(
    capsys: pytest.CaptureFixture[str], level: str, shown: list[str]
) -> None:
    set_up_logging(level, "text")
    logger = logging.getLogger("httpx2")
    logger.info("HTTP Request: GET")
    logger.warning("slow")
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == shown
