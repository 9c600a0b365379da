"""The picture of the comparison: well-formed, with the numbers of the record in it."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from tools.plot_peers import LEFT, RIGHT, WIDTH, picture

SVG = "{http://www.w3.org/2000/svg}"


def record() -> dict[str, Any]:
    row = {
        "case": "decode-1",
        "tokens_per_s": {"moeserve": 54.25, "a<b": 1234.4},
        "ratio": {"moeserve": 1.0, "a<b": 0.04},
        "floor": 100.0,
        "share_of_floor": {"moeserve": 0.5, "a<b": 1.7},
    }
    return {
        "what": "peers",
        "environment": {"cpu": {"model": "Some & CPU", "allowed_cores": 2}},
        "results": {
            "engines": {"moeserve": "0.1.0", "a<b": "7"},
            "cases": [row, row | {"case": "other-case"}],
        },
    }


def test_the_numbers_are_in_the_picture() -> None:
    root = ElementTree.fromstring(picture(record()))
    texts = [element.text or "" for element in root.iter(SVG + "text")]
    assert texts.count("54.2") == 2
    assert texts.count("1,234  (0.04 x)") == 2
    assert {"moeserve 0.1.0", "a<b 7", "batch 1", "other-case", "100 %"} <= set(texts)
    assert any("2 cores, Some & CPU" in text for text in texts)


def test_a_bar_is_as_long_as_its_share_of_the_floor_and_ends_there() -> None:
    root = ElementTree.fromstring(picture(record()))
    widths = [
        float(bar.attrib["width"])
        for bar in root.iter(SVG + "rect")
        if float(bar.attrib["x"]) == LEFT
    ]
    full = WIDTH - LEFT - RIGHT
    assert widths == [full / 2, full, full / 2, full]


def test_everything_lies_inside() -> None:
    root = ElementTree.fromstring(picture(record()))
    height = float(root.attrib["height"])
    for element in root.iter():
        for name in ("y", "y1", "y2"):
            assert 0 <= float(element.attrib.get(name, 0)) <= height
        if element.tag == SVG + "text":
            assert float(element.attrib["x"]) + 6.5 * len(element.text or "") <= WIDTH


def test_it_follows_the_readers_theme() -> None:
    assert re.search(r"@media \(prefers-color-scheme: dark\)", picture(record()))


def test_a_record_of_something_else_is_refused() -> None:
    with pytest.raises(SystemExit, match="'startup' without cases"):
        picture({"what": "startup", "results": {}})
