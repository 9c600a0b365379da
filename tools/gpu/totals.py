"""Results that follow from all of a section's cases. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def of_ranks(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether all ways have the tokens of one rank."""
    ways = {way["way"]: way["token_ids"] for way in record.get("ways", ())}
    one = ways.pop("one rank", None)
    same = {name: ids == one for name, ids in ways.items() if one is not None}
    return {"same_tokens": same, "wrong": [name for name, is_same in same.items() if not is_same]}


def of_tests(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return totals as a JUnit file has them."""
    done, failed, skipped = (record.get(key, ()) for key in ("done", "failed", "skipped"))
    return {
        "tests": len(done) + len(failed),
        "failures": len(failed),
        "passed": len(done) - len(skipped),
        "reasons": {why: skipped.count(why) for why in sorted(set(skipped))},
    }
