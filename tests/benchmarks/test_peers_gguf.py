"""Random GGUF files for the comparison with other engines: their types, values and routing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.peers_gguf import DEVIATION, MIXTURES, Size, random_blocks, type_of, write
from moeserve import LLM, SamplingParams

SMALL = Size(layers=2, hidden=256, experts=8, expert=256, heads=4, kv_heads=2, head=64)


TYPES = "Q4_0 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS IQ3_XXS IQ3_S IQ2_XXS IQ2_S"


@pytest.mark.parametrize("kind", TYPES.split())
def test_rows_have_no_mean(kind: str) -> None:
    """Otherwise all tokens would choose the same experts."""
    tensor_type = gguf.GGMLQuantizationType[kind]
    raw = random_blocks(np.random.default_rng(1), tensor_type, (64, 2048), DEVIATION)
    values = gguf.quants.dequantize(raw, tensor_type)
    assert values.std() == pytest.approx(DEVIATION, rel=0.1)
    expected = DEVIATION / 2048**0.5  # of the mean of independent values
    assert np.abs(values.mean(-1)).mean() < 1.5 * expected


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        ("Q4_K_M", {"Q4_K": 24, "Q6_K": 24}),
        ("Q3_K_M", {"Q5_K": 1, "Q4_K": 23}),
        ("Q2_K", {"Q3_K": 24}),
        ("IQ2_XXS", {"Q2_K": 3, "IQ2_XXS": 21}),
        ("UD", {"IQ4_XS": 12, "IQ3_S": 12}),
    ],
)
def test_down_projections_have_the_types_of_llama_cpp(
    mixture: str, expected: dict[str, int]
) -> None:
    names = [f"blk.{layer}.ffn_down_exps.weight" for layer in range(24)]
    if mixture == "Q4_K_M":
        names += [f"blk.{layer}.attn_v.weight" for layer in range(24)]
    found = Counter(type_of(name, 3, MIXTURES[mixture], 24).name for name in names)
    assert found == expected


@pytest.mark.parametrize("mixture", MIXTURES)
def test_files_are_served(mixture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    num_bytes, weights = write(path, MIXTURES[mixture], SMALL)
    assert num_bytes < path.stat().st_size
    assert 0.2 < num_bytes / weights < 1.2
    reader = gguf.GGUFReader(path)
    gates = next(x for x in reader.tensors if x.name == "blk.0.ffn_gate_exps.weight")
    assert len({expert.tobytes() for expert in gates.data}) == SMALL.experts
    with LLM(str(path), max_model_len=64, kv_cache_bytes=2**22, threads=1) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]}],
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        )
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [4, 4]
