"""docs/exactness.md matches the newest result, in which no answer differs."""

from __future__ import annotations

import json

from tests.diffusion import DIFFUSION
from tests.families import FAMILIES
from tools import exactness_table


def test_the_page_is_up_to_date() -> None:
    assert exactness_table.PATH.read_text() == exactness_table.text()


def test_no_answer_differs_and_every_family_is_there() -> None:
    results = json.loads(exactness_table.newest().read_text())["results"]
    assert {result["family"] for result in results} == {*FAMILIES, *DIFFUSION}
    assert {result["different"] + result.get("different_mtp", 0) for result in results} == {0}
    assert min(result["cached_tokens"] for result in results) > 1000
