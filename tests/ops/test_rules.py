"""Rules that no model can have, and what the rest mean."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.errors import ConfigError
from moeserve.ops.rules import SWIGLU, Activation, RouterRule


@pytest.mark.parametrize(
    ("rule", "num_experts", "top_k", "why"),
    [
        ({"groups": 3, "kept_groups": 1}, 16, 2, "keep 1 of 3 equal groups of 16 experts"),
        ({"groups": 4, "kept_groups": 5}, 16, 2, "keep 5 of 4 equal groups"),
        ({"groups": 4, "kept_groups": 0}, 16, 2, "keep 0 of 4 equal groups"),
        ({"groups": 4, "kept_groups": 2}, 4, 2, "groups of 1 experts are too small"),
        (
            {"groups": 4, "kept_groups": 2},
            16,
            9,
            "cannot choose 9 experts: 2 of 4 groups of 16 remain",
        ),
        ({}, 4, 5, "cannot choose 5 experts"),
        ({}, 4, 0, "cannot choose 0 experts"),
        ({"on_input": True}, 4, 2, "the input of one expert per token, not of 2"),
    ],
)
def test_rules_that_cannot_be(rule: dict[str, Any], num_experts: int, top_k: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RouterRule(**rule).check(num_experts, top_k)


def test_rules_that_can() -> None:
    RouterRule().check(4, 4)
    RouterRule(groups=4, kept_groups=4).check(4, 4)
    RouterRule(groups=4, kept_groups=2, group_score="max").check(4, 2)
    RouterRule(on_input=True).check(4, 1)


def test_plain_activations() -> None:
    assert Activation().plain
    assert Activation() == SWIGLU
    assert not Activation(limit=7.0).plain
    after = Activation(limit=7.0, limit_after=True)
    assert (after.gate_limit, after.act_limit) == (float("inf"), 7.0)
