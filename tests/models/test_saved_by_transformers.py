"""Checkpoints as transformers saves them: every causal language model of a known `model_type`.

Names of architectures and tensors may differ from those of published checkpoints.
"""

from __future__ import annotations

import functools
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moeserve.models.hf_config import read_model_spec
from moeserve.models.registry import FAMILIES as REGISTERED
from tests.checkpoints import randomise
from tests.families import ARCHITECTURES, FAMILIES, SMALL

from .conftest import Driver

KNOWN = {model_type for family in REGISTERED.values() for model_type in family.model_types}
SAVED = sorted(KNOWN & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
# Keys that say how transformers' class differs from published checkpoints of the same name. It
# rotates halves of heads, and has its own epsilon for the norms of latents.
UNSAID: dict[str, dict[str, Any]] = {"hy_v4": {"rope_interleave": False, "rms_norm_eps": 1e-6}}
PROMPT = torch.randint(0, 250, (90,), generator=torch.Generator().manual_seed(2)).tolist()


@functools.cache
def rows() -> dict[str, str]:
    """Return the row of tests/families.py for each `model_type` of transformers."""
    named = {name: name for name in FAMILIES}
    return named | {
        getattr(transformers, class_name + "Config").model_type: name
        for name, (class_name, _) in reversed(FAMILIES.items())
        if name not in ARCHITECTURES
    }


def small_config(model_type: str) -> Any:
    _, options = FAMILIES[rows()[model_type]]
    if "text_config" in options:
        options = {**options, "text_config": {**SMALL, **options["text_config"]}}
    else:
        options = {**SMALL, **options}
    return transformers.AutoConfig.for_model(model_type, **deepcopy(options))


@pytest.mark.parametrize("model_type", SAVED)
def test_a_saved_causal_model_is_served(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    unsaid = UNSAID.get(model_type, {})
    config = small_config(model_type)
    for key, value in unsaid.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | unsaid))
    family = REGISTERED[read_model_spec(tmp_path).architecture]
    assert type(model).__name__ in (family.architecture, family.saved_as)
    assert model.config.model_type in family.model_types
    ours = Driver(tmp_path).prefill("a", PROMPT)  # it refuses tensors that the plan leaves out
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPT])).logits[0]
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert error.max() <= 2e-5, error.max()
