"""Checkpoints for the comparison with other engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import peers_models
from moeserve.models.hf_config import read_model_spec


def test_kinds_of_layers_are_spelled_as_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers renames them as it saves a configuration, and llama.cpp's converter does not
    know the new words.
    """
    family, options = peers_models.SHAPES["granite-4-h"]
    small = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 6,
        "layer_types": options["layer_types"][:6],
        "intermediate_size": 16,
    }
    monkeypatch.setitem(peers_models.SHAPES, "small", (family, options | small))
    assert peers_models.write_checkpoint("small", tmp_path) > 32000 * 2 * 32
    kinds = json.loads((tmp_path / "config.json").read_text())["layer_types"]
    assert kinds == ["mamba"] * 5 + ["attention"]
    assert [layer.mixer.rule.is_full for layer in read_model_spec(tmp_path).layers] == [
        False
    ] * 5 + [True]
