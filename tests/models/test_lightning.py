"""Lightning attention: decays of heads and layers, and configs that nothing computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.blocks.lightning import Lightning, slopes
from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec


def test_slopes_of_any_number_of_heads() -> None:
    assert slopes(1) == [2**-8]
    assert slopes(4) == [2**-2, 2**-4, 2**-6, 2**-8]
    assert slopes(6) == [*slopes(4), *slopes(8)[:4:2]]
    assert slopes(7) == [*slopes(4), *slopes(8)[:6:2]]


def test_layers_decay_less_and_less(make_checkpoint: Any) -> None:
    """The last layer of a group, and those after the last whole group, have other attention."""
    layers = read_model_spec(make_checkpoint("bailing_moe_v2_5").path).layers
    mixers = [layer.mixer for layer in layers]
    assert [isinstance(mixer, Lightning) for mixer in mixers] == [True, True, False, False]
    found = [mixer.log_decays[0] for mixer in mixers if isinstance(mixer, Lightning)]
    assert found == pytest.approx([-(4 / 3 + 1e-5) / 4, -(1 + 1e-5) / 4])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("linear_silu", True), ("use_bias", True), ("use_qk_norm", False), ("group_norm_size", 3),
        ("num_kv_heads_for_linear_attn", 2), ("rope_interleave", False), ("router_dtype", "bf16"),
        ("layer_group_size", 0),
    ],
)  # fmt: skip
def test_what_nothing_computes_is_refused(
    key: str, value: Any, make_checkpoint: Any, tmp_path: Path
) -> None:
    config = json.loads((make_checkpoint("bailing_moe_v2_5").path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(CheckpointError, match=f"{key} is {value!r}"):
        read_model_spec(tmp_path)
