"""The spellings of numbers and words that flags and settings accept."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from moeserve.cli.settings import convert, parse_int


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1_000", 1000),
        ("-3", -3),
        ("25.6k", 25_600),
        ("1k", 1000),
        ("1K", 1024),
        ("2GiB", 2 * 2**30),
        ("2 GiB", 2 * 2**30),
        ("2Gi", 2 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("2GB", 2 * 10**9),
        ("2kB", 2000),
        ("512B", 512),
        ("3t", 3 * 10**12),
    ],
)
def test_numbers(text: str, number: int) -> None:
    assert parse_int(text) == number


@pytest.mark.parametrize(
    "text", ["", "k", "1.5", "1e3", "0x10", "1.0001k", "1kk", "--1", "1 2", "NaN", "1Q", "\u0663"]
)
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_int(text)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (bool, "yes", True),
        (bool, "OFF", False),
        (bool, True, True),
        (int, 7, 7),
        (int | None, None, None),
        (int | None, "7k", 7000),
        (float, "0.5", 0.5),
        (float, 1, 1.0),
        (str, "a", "a"),
        (str | None, "a", "a"),
        (Literal["auto", "cpu"], "cpu", "cpu"),
        (tuple[str, ...], "a,b", ("a", "b")),
        (tuple[str, ...], ["a"], ("a",)),
    ],
)
def test_conversion(kind: Any, value: Any, expected: Any) -> None:
    assert convert(kind, value) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (bool, "maybe"),
        (bool, 1),
        (int, True),
        (int, 1.5),
        (int, None),
        (int, [1]),
        (float, "nan"),
        (float, "inf"),
        (float, True),
        (str, 7),
        (str, ""),
        (Literal["auto", "cpu"], "gpu"),
        (tuple[str, ...], ""),
        (tuple[str, ...], [1]),
        (tuple[str, ...], 5),
    ],
)
def test_refusals(kind: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|missing"):
        convert(kind, value)


def test_long_values_are_not_echoed() -> None:
    with pytest.raises(ValueError, match=r"\.\.\.") as caught:
        convert(bool, "x" * 10_000)
    assert len(str(caught.value)) < 120
