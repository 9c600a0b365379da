"""MTP layers of GGUF files: the drafts are those of the same head in a safetensors checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gguf_files import OPTIONS, write_gguf
from tests.mtp import write_mtp_checkpoint

from .test_speculation import runner_of, serve, submits_of


@pytest.mark.full("models", keep=2)
@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v32"])
def test_a_head_drafts_as_from_safetensors(name: str, tmp_path: Path) -> None:
    path = write_mtp_checkpoint(name, tmp_path / "checkpoint", **OPTIONS.get(name, {})).path
    file = write_gguf(name, path, tmp_path / "model.gguf")
    plain = runner_of(file)
    submits = submits_of(plain.spec.vocab_size, 6)
    expected, *none = serve(plain, submits)
    found, verified, right = serve(runner_of(file, speculate="mtp:2"), submits)
    assert none == [0, 0]
    assert found == expected
    assert verified > 0
    assert (found, verified, right) == serve(runner_of(path, speculate="mtp:2"), submits)
