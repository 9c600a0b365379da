"""Omitted keys of config.json have the defaults of transformers.

They are those of the family's configuration class.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError

from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec
from moeserve.models.registry import FAMILIES as REGISTERED
from moeserve.models.spec import ModelSpec
from tests.families import ARCHITECTURES, FAMILIES, architecture

FAMILIES_OF_TRANSFORMERS = [name for name in FAMILIES if name not in ARCHITECTURES]


def meaning(values: dict[str, Any], folder: Path) -> ModelSpec | None:
    """The spec of a config.json, or None if it is refused: other keys need not fit to a default."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        return read_model_spec(folder)
    except CheckpointError:
        return None


def as_written(config: Any) -> dict[str, Any]:
    """A configuration as transformers writes it, with infinities as objects."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def configuration_of(name: str) -> Any:
    return getattr(transformers, FAMILIES[name][0] + "Config")


@pytest.mark.parametrize("name", FAMILIES_OF_TRANSFORMERS)
def test_an_absent_key_has_the_value_that_transformers_gives_it(
    name: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    make = configuration_of(name)
    family = REGISTERED[architecture(name)]
    full = json.loads((make_checkpoint(name).path / "config.json").read_text())
    text = full[family.text] if family.text else full
    skipped = {
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "num_hidden_layers",
        "hidden_size",
    }
    differ = []
    for key in sorted(text.keys() - skipped):
        fewer = {other: value for other, value in text.items() if other != key}
        values = {**full, family.text: fewer} if family.text else fewer
        try:
            explicit = as_written(make.from_dict(json.loads(json.dumps(values))))
        except StrictDataclassClassValidationError:
            explicit = {}
        if meaning(values, tmp_path) != meaning(explicit, tmp_path):
            differ.append(key)
    assert differ == []


@pytest.mark.parametrize("name", FAMILIES_OF_TRANSFORMERS)
def test_an_empty_config_is_the_default_model_of_transformers(name: str, tmp_path: Path) -> None:
    family = REGISTERED[architecture(name)]
    own = {"architectures": [family.architecture], "dtype": "float32"}
    empty = own | ({family.text: {}} if family.text else {})
    assert meaning(empty, tmp_path) == meaning(as_written(configuration_of(name)()) | own, tmp_path)
