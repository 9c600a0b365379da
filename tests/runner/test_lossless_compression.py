"""bf16 weights in 12 bits: the bits of those in 16, for any rows, and clear errors where they
cannot be.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.cluster import build
from moeserve.config import Limits, config_of
from moeserve.errors import CheckpointError, ConfigError
from moeserve.loader.weights import Reader
from moeserve.models.hf_config import read_model_spec
from moeserve.moe.experts.native import NativeExperts
from moeserve.ops.native import native
from moeserve.ops.native_layer import BYTES_IN_12_BITS, NativeLinear
from tests.moe import test_native_experts as experts
from tests.runner.test_expert_memory import least
from tests.runner.test_packed_cache import refuse, run, same

module: Any = native()
pytestmark = pytest.mark.skipif(
    module is None or "avx512_bf16" not in module.supported_isas(),
    reason="needs native kernels for AVX512-BF16",
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    module.set_threads([-1] * 2)
    yield
    module.set_threads([-1])


def weights(columns: int, depth: int, unusual: float) -> Tensor:
    """Normal ones, but for a share that is tiny: denormals and zeros are among them."""
    generator = torch.Generator().manual_seed(depth)
    w = torch.randn(columns, depth, generator=generator)
    tiny = torch.rand(columns, depth, generator=generator) < unusual
    return torch.where(
        tiny, w * 2.0 ** (-140 * torch.rand(columns, depth, generator=generator)), w
    ).bfloat16()


@pytest.mark.parametrize(("depth", "columns"), [(8, 1), (64, 17), (1000, 40), (2048, 100)])
@pytest.mark.parametrize("unusual", [0, 1e-4, 1e-3])
def test_linear_layers_have_the_bits_of_16(depth: int, columns: int, unusual: float) -> None:
    w = weights(columns, depth, unusual)
    x = torch.randn(300, depth).bfloat16()
    bias = torch.randn(columns)
    compressed = NativeLinear(w, bias, lossless=True)
    plain = NativeLinear(w, bias)
    assert compressed.packed.nbytes < 0.8 * plain.packed.nbytes or depth < 100
    for rows in (*range(1, 15), 24, 49, 300):
        assert torch.equal(compressed(x[:rows]), plain(x[:rows])), rows


def test_inputs_that_are_no_multiple_of_8_stay_in_16_bits() -> None:
    w = weights(20, 36, 0)
    assert torch.equal(NativeLinear(w, lossless=True).packed, NativeLinear(w).packed)


@pytest.mark.parametrize(
    "counts", [[3, 0, 1, 17, 2], [0, 0, 140, 0, 0], [0, 0, 0, 0, 1], [1] * 5, [8, 50, 7, 0, 49]]
)
def test_experts_have_the_bits_of_16(counts: list[int]) -> None:
    made = experts.make(torch.bfloat16)
    x = experts.rows(sum(counts), 64, torch.bfloat16)
    compressed = NativeExperts(lossless=True).pack(made)
    plain = NativeExperts().pack(made)
    assert compressed.bytes_eB.nbytes < 0.9 * plain.bytes_eB.nbytes
    assert torch.equal(experts.run(compressed, x, counts), experts.run(plain, x, counts))
    moved = NativeExperts(lossless=True).pack_expert(made.w13_eFD[1], made.w2_eDI[1])
    assert torch.equal(moved.bytes_eB[0], compressed.bytes_eB[1])


@pytest.mark.parametrize("which", ["experts", "all"])
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "gpt_oss", "granite_moe_hybrid"])
def test_tokens_and_logits_are_those_of_16(
    case: str, which: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Also with packed weights from a file, and with experts on disk."""
    path = make_checkpoint(case).path
    settings: dict[str, Any] = {"dtype": "bfloat16", "lossless_compression": which}
    expected = run(path, dtype="bfloat16")
    same(run(path, **settings), expected)
    settings["packed_cache"] = str(tmp_path)
    same(run(path, dtype="bfloat16", packed_cache=str(tmp_path)), expected)
    same(run(path, **settings), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "read", refuse)
        same(run(path, **settings), expected)
    same(run(path, **settings, expert_memory=least(path, **settings)), expected)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_start_tells_the_bytes_of_weights_in_12_bits(make_checkpoint: Any) -> None:
    path = make_checkpoint("qwen3_moe").path
    sizes = ("max_model_len", "block_size", "num_blocks", "prefill_chunk")
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=256, **dict.fromkeys(sizes, 64))
    spec = read_model_spec(path)
    facts = {"dtype": "bfloat16", "device": "cpu"}
    ways = [config_of(path, lossless_compression=which) for which in ("off", "experts", "all")]
    plain, experts_only, all_layers = (
        build._facts_of(config, spec, limits, 0.0, **facts) for config in ways
    )
    assert (
        experts_only.expert_bytes
        == all_layers.expert_bytes
        == int(plain.expert_bytes * BYTES_IN_12_BITS / 2)
    )
    saved = (
        (plain.expert_bytes - experts_only.expert_bytes) * spec.num_experts * len(spec.moe_layers)
    )
    assert plain.weight_bytes - experts_only.weight_bytes == pytest.approx(saved, rel=1e-3)
    assert all_layers.weight_bytes < experts_only.weight_bytes


def test_what_cannot_be_compressed(make_checkpoint: Any) -> None:
    path = make_checkpoint("qwen3_moe").path
    with pytest.raises(
        ConfigError, match=r"lossless_compression=all needs bfloat16 .* here torch\.float32"
    ):
        run(path, dtype="float32", lossless_compression="all")
    with pytest.raises(ConfigError, match="computed by linear: torch"):
        run(path, dtype="bfloat16", kernels="torch", lossless_compression="experts")
    nothing = "but no experts of this model have 16-bit weights.* use lossless_compression=off"
    for case, settings in (("llama", {}), ("qwen3_moe", {"quantization": "int8"})):
        with pytest.raises(ConfigError, match=nothing):
            run(
                make_checkpoint(case).path,
                dtype="bfloat16",
                lossless_compression="experts",
                **settings,
            )
    bits = torch.randint(
        -(2**15), 2**15, (16, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int16
    )
    with pytest.raises(
        CheckpointError,
        match=r"weights \[16, 64\] cannot be compressed to 12 bits.* use lossless_compression=off",
    ):
        NativeLinear(bits.view(torch.bfloat16), lossless=True)
