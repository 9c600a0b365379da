"""Quantized weights in the layouts of files are read exactly, as a whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.fields import Fields
from moeserve.loader.load_plan import LoadPlan, Param, Piece
from moeserve.loader.quantization import read_stored_formats
from moeserve.loader.stored_format import StoredFormat
from moeserve.loader.weights import Reader
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import load_plan
from moeserve.ops import quantized
from moeserve.ops.quantized import Quantized
from tests.loader.eager import load
from tests.quantized_checkpoints import FORMS, Form, dequantized, stored, write_quantized

ALL = slice(None)
E = 3
D = 96
I = 40  # noqa: E741


@pytest.mark.parametrize("form", FORMS)
def test_parameters_are_exactly_what_they_mean(
    form: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    paths = write_quantized(make_checkpoint("qwen3_moe").path, tmp_path, FORMS[form])
    found, expected = (everything(path) for path in paths)
    assert found["layers.0.w13"].kind == found["layers.0.qkv"].kind == FORMS[form].kind
    for name, param in expected.items():
        got = found[name]
        if isinstance(got, Quantized):
            assert torch.equal(quantized.dequantized(got), dequantized(got)), name
            got = dequantized(got)
        assert torch.equal(got, param), name


def everything(path: Path) -> dict[str, Any]:
    spec = read_model_spec(path)
    checkpoint = open_checkpoint(path, spec.stored)
    return load(checkpoint, load_plan(spec, checkpoint.names), torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_a_share_of_the_rows_is_that_of_the_whole(form: str, tmp_path: Path) -> None:
    """Whatever words and blocks the rows share with their neighbours."""
    tensors, meaning_NK = stored("x.weight", torch.randn(40, 64), FORMS[form])
    save_file(tensors, tmp_path / "model.safetensors")
    config = Fields(tmp_path / "config.json", {"quantization_config": FORMS[form].config}, {})
    pieces = (
        Piece("x.weight", (40, 64), "w2", at=(slice(0, 18),), take=(slice(5, 23),)),
        Piece("x.weight", (40, 64), "w2", at=(slice(18, 24),), take=(slice(1, 40, 7), ALL)),
    )
    found = load(
        open_checkpoint(tmp_path, read_stored_formats(config)),
        LoadPlan((Param("w2", (24, 64)),), pieces),
        torch.float32,
    )["w2"]
    assert torch.equal(dequantized(found), torch.cat((meaning_NK[5:23], meaning_NK[1:40:7])))


FUSED = {
    "mxfp4": (
        Form("fp4", group=32, method="mxfp4"),
        StoredFormat(kind="fp4", layout="blocks", group=32),
    ),
    "nvfp4": (
        Form("fp4", group=16, method="modelopt"),
        StoredFormat(kind="fp4", layout="nibbles", group=16),
    ),
    "fp8": (Form("fp8", rows=0, method="fp8"), StoredFormat(kind="fp8", rows=0)),
}


@pytest.mark.parametrize("kind", FUSED)
def test_fused_experts_with_gate_and_up_by_turns(kind: str, tmp_path: Path) -> None:
    """gpt-oss has this layout.

    Unquantized experts are [E, D, 2I], but rows of mxfp4 and nvfp4 are outputs. Some rows of one
    expert equal those of all.
    """
    form, wanted = FUSED[kind]
    tensors, meaning_EFD = stored("experts.gate_up_proj", torch.randn(E, 2 * I, D), form)
    if kind == "fp8":
        tensors["experts.gate_up_proj"] = tensors["experts.gate_up_proj"].mT.contiguous()
        tensors["experts.gate_up_proj_scale"] = tensors["experts.gate_up_proj_scale"].view(E, 1, 1)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    halves = meaning_EFD.unflatten(1, (I, 2)).transpose(1, 2).flatten(1, 2)

    def piece(param: str, at: Any, *take: Any) -> Piece:
        return Piece("experts.gate_up_proj", (E, D, 2 * I), param, at, take, transposed=True)

    gate = slice(0, None, 2)
    up = slice(1, None, 2)
    pieces = [
        piece("w13", (ALL, slice(0, I)), ALL, ALL, gate),
        piece("w13", (ALL, slice(I, None)), ALL, ALL, up),
        piece("one.w13", (0, slice(0, 5)), 2, ALL, slice(0, 10, 2)),
        piece("one.w13", (0, slice(5, 10)), 2, ALL, slice(1, 11, 2)),
        piece("wide", (), 1, ALL, up),
    ]
    params = (
        Param("w13", (E, 2 * I, D)),
        Param("one.w13", (1, 10, D)),
        Param("wide", (I, D), widened=True),
    )
    checkpoint = open_checkpoint(tmp_path, [wanted])
    found = load(checkpoint, LoadPlan(params, tuple(pieces)), torch.float32)
    assert torch.equal(dequantized(found["w13"]), halves)
    assert torch.equal(
        dequantized(found["one.w13"])[0], torch.cat((halves[2, :5], halves[2, I : I + 5]))
    )
    assert torch.equal(found["wide"], halves[1, I:])
    assert len(list(Reader(checkpoint).jobs(pieces[0], found["w13"]))) == E, (
        "one at a time: they are large unpacked"
    )


def test_blocks_of_scales_turn_with_their_values(tmp_path: Path) -> None:
    """[E, D, 2I] in blocks of 16 outputs and 32 inputs, the last of either smaller; and a share of
    the rows.
    """
    form = Form("fp8", rows=16, group=32, method="fp8")
    tensors, meaning_EFD = stored("w", torch.randn(E, 2 * I + 3, D + 8), form)
    save_file(
        {name: tensor.mT.contiguous() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    pieces = (
        Piece(
            "w", (E, D + 8, 2 * I + 3), "w2", take=(slice(1, 3), ALL, slice(9, 71)), transposed=True
        ),
    )
    checkpoint = open_checkpoint(tmp_path, [StoredFormat(kind="fp8", rows=16, group=32)])
    found = load(checkpoint, LoadPlan((Param("w2", (2, 62, D + 8)),), pieces), torch.float32)
    assert torch.equal(dequantized(found["w2"]), meaning_EFD[1:, 9:71])


def test_several_formats_in_a_checkpoint(tmp_path: Path) -> None:
    """Formats are told apart by dtypes, then by shapes of scales, then by names.

    4-bit words with a scale per channel differ from 8-bit ones in nothing else.
    """
    forms = {
        "experts.weight": Form("int4", group=32, packed=True),
        "wide.weight": Form("int4", group=64, packed=True),
        "a.weight": Form("int4", packed=True),
        "b.weight": Form("int8", packed=True),
        "c.weight": Form("fp8"),
        "d.weight": Form("fp4", group=16, packed=True),
        "plain.weight": None,
    }
    w = torch.randn(24, 128)
    parts = dict[str, Tensor]()
    meanings = dict[str, Tensor]()
    for name, form in forms.items():
        shaped = w[:, : 256 if name == "a.weight" else 128].repeat(
            1, 2 if name == "a.weight" else 1
        )
        tensors, meanings[name] = stored(name, shaped, form) if form else ({name: w}, w)
        parts |= {key: tensor for key, tensor in tensors.items() if not key.endswith("_shape")}
    save_file(parts, tmp_path / "model.safetensors")
    formats = [
        StoredFormat(kind="int4", layout="words", targets=("a",)),
        StoredFormat(kind="int8", layout="words", targets=("re:b$",)),
        StoredFormat(kind="int4", layout="words", group=32),
        StoredFormat(kind="int4", layout="words", group=64),
        StoredFormat(kind="fp8"),
        StoredFormat(kind="fp4", layout="nibbles", group=16),
    ]
    params = tuple(
        Param(f"{name}.down", tuple(meaning.shape)) for name, meaning in meanings.items()
    )
    pieces = tuple(
        Piece(name, tuple(meaning.shape), f"{name}.down") for name, meaning in meanings.items()
    )
    found = load(open_checkpoint(tmp_path, formats), LoadPlan(params, pieces), torch.float32)
    for name, meaning in meanings.items():
        got = found[f"{name}.down"]
        assert torch.equal(dequantized(got) if isinstance(got, Quantized) else got, meaning), name
    with pytest.raises(CheckpointError, match=r"targets has the pattern 're:\('"):
        open_checkpoint(
            tmp_path, [StoredFormat(kind="int8", layout="words", targets=("re:(",)), *formats]
        )


def test_e8m0_to_its_ends(tmp_path: Path) -> None:
    """2 ** -127, which is no normal float, up to 2 ** 127; 255 is NaN."""
    scales = torch.tensor([[0], [1], [127], [254]], dtype=torch.uint8)
    blocks = torch.full((4, 1, 16), 0x22, dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    formats = [FUSED["mxfp4"][1]]
    plan = LoadPlan((Param("w2", (4, 32)),), (Piece("w", (4, 32), "w2"),))
    found = load(open_checkpoint(tmp_path, formats), plan, torch.bfloat16)["w2"]
    assert found.scales[:, 0].tolist() == [2.0**-127, 2.0**-126, 1, 2.0**127]
    scales[2] = 255
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"tensor 'w_scales' in model.safetensors has NaN or infinity"
    ):
        load(open_checkpoint(tmp_path, formats), plan, torch.bfloat16)


def test_a_widened_value_too_large_for_float16(tmp_path: Path) -> None:
    save_file(
        {"w": torch.ones(8, 8, dtype=torch.int8), "w_scale": torch.full((8, 1), 1e5)},
        tmp_path / "model.safetensors",
    )
    plan = LoadPlan((Param("w", (8, 8), widened=True),), (Piece("w", (8, 8), "w"),))
    checkpoint = open_checkpoint(tmp_path, [StoredFormat(kind="int8")])
    assert load(checkpoint, plan, torch.float32)["w"][0, 0] == 1e5
    with pytest.raises(CheckpointError, match="'w' has values that float16 cannot hold"):
        load(checkpoint, plan, torch.float16)


Q = "model.layers.0.self_attn.q_proj."
Change = Callable[[dict[str, Tensor]], Any]
CHANGES: list[tuple[str, Change, str]] = [
    (
        "int4, gptq",
        lambda t: t[Q + "g_idx"].copy_(t[Q + "g_idx"].flip(0)),
        "g_idx' in model.safetensors has groups",
    ),
    (
        "int4, gptq",
        lambda t: t[Q + "qzeros"].fill_(-1),
        f"{Q}qzeros' in model.safetensors has a zero point of 16",
    ),
    ("int4, gptq", lambda t: t.pop(Q + "qzeros"), "needs a tensor of zero points, I32 [2, 16]"),
    ("int4, gptq", lambda t: t.pop(Q + "scales"), f"is I32, but {Q}scales is missing"),
    (
        "int8, gptq",
        lambda t: t[Q + "qzeros"].fill_(0),
        "has other zero points than 128, but config.json says",
    ),
    (
        "int4, gptq_v2 and symmetric",
        lambda t: t[Q + "qzeros"].fill_(0),
        "has other zero points than 8",
    ),
    (
        "int4, gptq",
        lambda t: t.update({Q + "g_idx": torch.zeros(9, dtype=torch.int32)}),
        "supported: I32 [64]",
    ),
    (
        "int4, gptq",
        lambda t: t.update({Q + "bias": torch.ones(128)}),
        "bias' in model.safetensors is not zero",
    ),
    (
        "int4, awq",
        lambda t: t.update({Q + "qweight": t[Q + "qweight"].T.contiguous()}),
        "implies [64, 16]",
    ),
    (
        "int4, awq",
        lambda t: t[Q + "scales"].fill_(torch.nan),
        f"{Q}scales' in model.safetensors has NaN or infinity",
    ),
    (
        "int4, awq",
        lambda t: t.update({Q + "weight": torch.ones(128, 64)}),
        f"is there as '{Q}weight', too",
    ),
    (
        "fp4, mxfp4",
        lambda t: t.pop(Q + "weight_scales"),
        f"is U8, but {Q}weight_scales is missing",
    ),
    (
        "fp4, mxfp4",
        lambda t: t.update({Q + "weight_blocks": torch.ones(128, 32, dtype=torch.uint8)}),
        "[128, 2, 16]",
    ),
    (
        "fp4, nvfp4 of ModelOpt",
        lambda t: t.pop(Q + "weight_scale_2"),
        "its outer scale (_scale_2 or",
    ),
    (
        "fp4, nvfp4 of ModelOpt",
        lambda t: t[Q + "weight_scale_2"].fill_(0),
        "weight_scale_2' in model",
    ),
    (
        "fp4, nvfp4 of ModelOpt",
        lambda t: t.update({Q + "weight_scale_2": torch.ones(7)}),
        "one number for each matrix",
    ),
    (
        "fp4, nvfp4 of compressed-tensors",
        lambda t: t[Q + "weight_global_scale"].fill_(torch.inf),
        "global_scale' in",
    ),
    (
        "fp4, nvfp4 of ModelOpt",
        lambda t: t[Q + "weight_scale"].view(torch.uint8).fill_(127),
        "weight_scale' in model",
    ),
    (
        "fp8 of ModelOpt",
        lambda t: t.update({Q + "weight_scale": torch.ones(2)}),
        "supported: [1, 1] scales in F32",
    ),
    (
        "fp8 of ModelOpt",
        lambda t: t.update({Q + "pre_quant_scale": torch.ones(64)}),
        "pre_quant_scale' in model.safe",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "change", "message"), CHANGES)
def test_what_does_not_fit_is_named(
    form: str, change: Change, message: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    path, _ = write_quantized(make_checkpoint("qwen3_moe").path, tmp_path, FORMS[form])
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        everything(path)
    assert message in str(caught.value)


def test_biases_of_zeros_are_none(make_checkpoint: Any, tmp_path: Path) -> None:
    """Biases that the model has are read."""
    path, _ = write_quantized(make_checkpoint("qwen2_moe").path, tmp_path, FORMS["int4, gptq"])
    tensors = load_file(path / "model.safetensors")
    zeros = dict.fromkeys(
        [Q[:-7] + "o_proj.bias", "model.layers.0.mlp.experts.1.up_proj.bias"],
        torch.zeros(64).half(),
    )
    save_file(
        tensors | {name: bias.clone() for name, bias in zeros.items()}, path / "model.safetensors"
    )
    bias = tensors[Q + "bias"].float()
    assert torch.equal(everything(path)["layers.0.qkv_bias"][: len(bias)], bias)


def test_scales_as_mistral_names_them(make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = write_quantized(make_checkpoint("qwen3_moe").path, tmp_path, FORMS["fp8 per tensor"])
    expected = everything(path)
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace(".weight_scale", ".qscale_weight"): t for name, t in tensors.items()}
    assert Q + "weight_scale" in tensors.keys() - renamed.keys()
    renamed[Q + "qscale_act"] = torch.ones(())
    save_file(renamed, path / "model.safetensors")
    found = everything(path)
    assert found.keys() == expected.keys()
    found_q, expected_q = (params["layers.0.qkv"] for params in (found, expected))
    assert torch.equal(dequantized(found_q), dequantized(expected_q))


def test_scales_of_a_cache_in_8_bits_are_not_needed(make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = write_quantized(
        make_checkpoint("qwen3_moe").path, tmp_path, FORMS["fp4, nvfp4 of ModelOpt"]
    )
    tensors = load_file(path / "model.safetensors")
    save_file(
        tensors
        | {Q[:-7] + "k_proj.k_scale": torch.ones(()), Q[:-7] + "attn.v_scale": torch.ones(1)},
        path / "model.safetensors",
    )
    assert everything(path)
