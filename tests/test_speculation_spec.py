"""What --speculate accepts, and what it says about the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.errors import ConfigError
from moeserve.speculation import MAX_DRAFTS, SpeculationSpec

CASES = {
    "ngram": ("ngram", "", 4, False),
    "ngram:4": ("ngram", "", 4, False),
    "ngram:15": ("ngram", "", 15, False),
    "suffix": ("suffix", "", 8, False),
    "suffix:1": ("suffix", "", 1, False),
    "mtp": ("mtp", "", 1, False),
    "mtp:2": ("mtp", "", 2, False),
    "model:/draft": ("model", "/draft", 3, False),
    "model:/draft:5": ("model", "/draft", 5, False),
    "model:7": ("model", "7", 3, False),  # a path, too
    "eagle:org/head@v1:2": ("eagle", "org/head@v1", 2, False),
    "eagle:C:/a:b": ("eagle", "C:/a:b", 3, False),
    "eagle:s3://a:9000/b:3": ("eagle", "s3://a:9000/b", 3, False),
    "model:/a:3:4": ("model", "/a:3", 4, False),
    "model:/a:3.5": ("model", "/a:3.5", 3, False),
    "auto": ("auto", "", 0, True),
    "auto:ngram:3": ("ngram", "", 3, True),
    "auto:suffix": ("suffix", "", 8, True),
    "auto:model:auto:x:2": ("model", "auto:x", 2, True),
}
WRONG = {
    "": "'' is not a proposer",
    "nramg:4": "'nramg' is not a proposer",
    "auto:": "'' is not a proposer",
    "auto:auto": "'auto' is not a proposer",
    "auto:4": "'4' is not a proposer",
    "NGRAM": "'NGRAM' is not a proposer",
    "ngram:": "takes only a number of drafts",
    "ngram:four": "takes only a number of drafts",
    "ngram:3:4": "takes only a number of drafts",
    "ngram:4.0": "takes only a number of drafts",
    "ngram:٤": "takes only a number of drafts",
    "mtp:/head": "takes only a number of drafts",
    "model": "needs the path",
    "model:": "needs the path",
    "model::3": "needs the path",
    "auto:eagle": "needs the path",
    "ngram:0": "1 to 15 drafts, got 0",
    "ngram:-1": "1 to 15 drafts, got -1",
    "suffix:16": "1 to 15 drafts, got 16",
    "model:/a:0": "1 to 15 drafts, got 0",
}


@pytest.mark.parametrize("value", CASES)
def test_a_setting_is_read_and_written(value: str) -> None:
    spec = SpeculationSpec.parse(value)
    assert (spec.kind, spec.path, spec.num_drafts, spec.auto) == CASES[value]
    assert SpeculationSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("value", WRONG)
def test_a_wrong_setting_is_refused_with_its_value(value: str) -> None:
    with pytest.raises(ConfigError) as error:
        SpeculationSpec.parse(value)
    assert WRONG[value] in str(error.value)
    assert repr(value) in str(error.value)


@given(
    st.sampled_from(["model", "eagle"]),
    st.text(min_size=1).filter(bool),
    st.integers(1, MAX_DRAFTS),
    st.booleans(),
)
def test_any_path_comes_back(kind: str, path: str, num_drafts: int, auto: bool) -> None:
    spec = SpeculationSpec(kind=kind, path=path, num_drafts=num_drafts, auto=auto)
    assert SpeculationSpec.parse(str(spec)) == spec


def test_auto_is_decided_by_the_model() -> None:
    auto = SpeculationSpec.parse("auto")
    assert (
        auto.resolve(has_mtp=True)
        == SpeculationSpec.parse("auto:mtp")
        == SpeculationSpec.parse("auto:mtp:3")
    )
    assert auto.resolve(has_mtp=False) == SpeculationSpec.parse("auto:ngram:8")
    suffix = SpeculationSpec.parse("suffix")
    assert suffix.resolve(has_mtp=True) is suffix
    with pytest.raises(ConfigError, match="no MTP head"):
        SpeculationSpec.parse("auto:mtp:2").resolve(has_mtp=False)
