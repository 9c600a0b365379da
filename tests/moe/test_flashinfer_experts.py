"""Experts by FlashInfer: the adapter over a stand-in that has the package's recorded signature and
checks what its own host code checks
(csrc/fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu), and what that code
believes without a look; and when it is chosen. The package itself runs on GPUs alone.

flashinfer_signatures.json: the parameters of `cutlass_fused_moe` in flashinfer/fused_moe/core.py,
without annotations.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moeserve.errors import ConfigError
from moeserve.kernels import configs, flashinfer_moe, tuning
from moeserve.kernels.grouped_fp8 import Scaled
from moeserve.kernels.grouped_gemm import launch_of, shape_of
from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.triton import FlashInferExperts, TritonExperts
from moeserve.moe.layer import FusedMoELayer, MoELayer
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.placement.placement import Placement
from moeserve.moe.plan import MoENeeds, plan_moe
from moeserve.moe.routing import Router
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import RowContext
from moeserve.ops.rules import RouterRule
from moeserve.ops.triton_ops import triton_table
from tests.kernels.device import DEVICE
from tests.moe.test_triton_experts import D, E, I, _as_on_a_gpu, weights
from tests.quantized_checkpoints import FORMS, write_quantized
from tests.runner.test_quantized import load

assert _as_on_a_gpu  # for all tests here, too
RELEASES: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("flashinfer_signatures.json").read_text()
)
HALF = torch.float16
SIZES = (E, I, D)
FOUND: list[tuple[int, int]] = []  # rows and choices of each call


def signature_of(release: str) -> inspect.Signature:
    space: dict[str, Any] = {"torch": torch}
    exec(f"def recorded({RELEASES[release][flashinfer_moe.FUNCTION]}): ...", space)
    return inspect.signature(space["recorded"])


def fused(
    input: Tensor, token_selected_experts: Tensor, token_final_scales: Tensor,
    fc1_expert_weights: Tensor, fc2_expert_weights: Tensor, output_dtype: torch.dtype,
    quant_scales: list[Tensor], output: Tensor, use_deepseek_fp8_block_scale: bool,
    use_fused_finalize: bool,
) -> list[Tensor]:  # fmt: skip
    """The definition: up rows first, then gate rows; each product and the activation rounded to 16
    bits.
    """
    x = input
    ids = token_selected_experts
    shares = token_final_scales
    w1 = fc1_expert_weights
    w2 = fc2_expert_weights
    (tokens, dim), top_k, (experts, _, width) = x.shape, ids.shape[1], w2.shape
    assert tokens > 0, "a grid of no blocks"
    assert (w1.shape, w2.shape) == ((experts, 2 * width, dim), (experts, dim, width))
    assert ids.shape == shares.shape == (tokens, top_k)
    assert (ids.dtype, shares.dtype) == (torch.int32, torch.float32)
    assert (output.shape, output.dtype, output_dtype) == (x.shape, x.dtype, x.dtype)
    assert all(part.is_contiguous() for part in (x, ids, shares, w1, w2, output, *quant_scales)), (
        "it reads pointers"
    )
    assert all(part.data_ptr() % 16 == 0 for part in (x, w1, w2, output))
    assert not use_fused_finalize, "which adds in 16 bits, in any order"
    if use_deepseek_fp8_block_scale:
        assert (x.dtype, w1.dtype, w2.dtype) == (
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
        )
        sizes = [(experts, part.shape[1] // 128, part.shape[2] // 128) for part in (w1, w2)]
        assert [tuple(part.shape) for part in quant_scales] == sizes
        assert all(part.dtype == torch.float32 for part in quant_scales)
        w1, w2 = (w.float() * s.repeat_interleave(128, 1).repeat_interleave(128, 2)
                  for w, s in zip((w1, w2), quant_scales, strict=True))  # fmt: skip
    else:
        assert x.dtype == w1.dtype == w2.dtype
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert quant_scales == []
        assert dim % 8 == width % 8 == 0, "16 bytes"
    FOUND.append((tokens, top_k))
    for token in range(tokens):
        total = torch.zeros(dim, device=x.device)
        for expert, share in zip(ids[token].tolist(), shares[token], strict=True):
            if 0 <= expert < experts:
                up, gate = (w1[expert].float() @ x[token].float()).to(x.dtype).float().chunk(2)
                hidden = (gate * torch.sigmoid(gate) * up).to(x.dtype).float()
                total += share * (w2[expert].float() @ hidden).to(x.dtype).float()
        output[token] = total.to(x.dtype)
    return [output]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """In place of flashinfer."""
    signature = signature_of("flashinfer 0.7.2.post1")

    def call(*args: Any, **options: Any) -> list[Tensor]:
        given = signature.bind(*args, **options).arguments
        assert set(given) == set(inspect.signature(fused).parameters), (
            "the stand-in knows no options"
        )
        return fused(**given)

    call.__signature__ = signature  # type: ignore[attr-defined]
    whole = ModuleType("flashinfer")
    made = ModuleType("flashinfer.fused_moe")
    made.cutlass_fused_moe = call  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", whole)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", made)
    monkeypatch.setattr(configs, "_folders", [configs.FOLDER])
    FOUND.clear()
    caches = (flashinfer_moe.unsupported_reason, configs.table, launch_of)
    for cached in caches:
        cached.cache_clear()
    yield made
    for cached in caches:
        cached.cache_clear()


def experts(is_chosen: bool = True, blocks: bool = False, **changes: Any) -> FlashInferExperts:
    """Return the experts as on a supported card."""
    ours = FlashInferExperts(DEVICE, is_chosen, blocks, False, SIZES, HALF, **changes)
    ours.caps = replace(ours.caps, obstacle=None)
    return ours


def plain(dtype: torch.dtype = HALF, seed: int = 0) -> ExpertWeights:
    w = weights("plain", seed)
    return ExpertWeights(w.w13_eFD.to(dtype), w.w2_eDI.to(dtype))


def rows(count: int, seed: int = 5, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor, bound: float = 5e-3) -> bool:
    return bool((found.float() - expected.float()).norm() <= bound * expected.float().norm())


@pytest.mark.parametrize(
    "rule", [RouterRule(), RouterRule(score="sigmoid", on_input=True)], ids=["top 2", "on input"]
)
@pytest.mark.parametrize(("tokens", "padding"), [(5, 1), (1, 0), (3, 3), (0, 0)])
def test_a_layer_in_one_call(package: Any, tokens: int, padding: int, rule: RouterRule) -> None:
    """Strided rows: padding reaches no expert, its output is zero, and loads are counted alike."""
    ops = triton_table(DEVICE, HALF, exact=False)
    top_k = 1 if rule.on_input else 2
    gate = torch.randn(E, D, generator=torch.Generator().manual_seed(4)).to(DEVICE, HALF)
    router = Router(ops.pack_linear(gate, None), top_k, rule, ops)
    needs = MoENeeds(
        hidden_size=D, expert_size=I, dtype="float16", device=DEVICE.type, max_tokens=8
    )
    x = rows(2 * tokens)[::2]
    outs = []
    loads = []
    for kernel in (experts(), TritonExperts()):
        plan = plan_moe(needs, [LocalAll2All(E)], [kernel])
        layer = plan.layer(
            router, kernel.pack(plain()), LogicalToPhysical(Placement.initial(1, E, 1), 0)
        )
        assert type(layer) is FusedMoELayer
        outs.append(layer(x, RowContext(tokens - padding), ubatch := UBatch()))
        loads.append(ubatch.take_load())
    assert [(tokens, top_k)] * bool(tokens) == FOUND
    assert torch.equal(*loads)
    assert close(*outs)
    assert not outs[0][tokens - padding :].any()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 17, 1], [0] * 4, [0, 0, 0, 1], [20, 0, 0, 0]], ids=str)
def test_rows_sorted_by_expert(package: Any, counts: list[int], on_device: bool) -> None:
    """Rows come from other ranks, and some after the last belong to no expert."""
    w = plain()
    total = sum(counts)
    x = rows(total + 3)
    counts_e = np.array(counts)
    ends_e: Any = counts_e.cumsum()
    found = torch.full_like(x, 7)
    expected = torch.empty_like(x)
    inbound = Inbound(Layout.GROUPED, x, counts_e, ends_e)
    TritonExperts().run(inbound, TritonExperts().pack(w), expected)
    if on_device:
        counts_e, ends_e = (
            torch.from_numpy(part).to(DEVICE, torch.int32) for part in (counts_e, ends_e)
        )
        inbound = Inbound(Layout.GROUPED, x, counts_e, ends_e, expected_rows=20)
    ours = experts()
    ours.run(inbound, ours.pack(w), found)
    assert [(total + 3 * on_device, 1)] * (total > 0 or on_device) == FOUND
    assert close(found[:total], expected[:total]) if total else True
    assert (found[total:] == (0 if on_device else 7)).all()


def test_one_expert_and_other_sizes(package: Any) -> None:
    """Widths are multiples of 8, no more."""
    random = torch.Generator().manual_seed(1)
    w = ExpertWeights(
        *(
            (torch.randn(1, *size, generator=random) / 8).to(DEVICE, HALF)
            for size in ((2 * 40, 72), (72, 40))
        )
    )
    x = torch.randn(5, 72, generator=random).to(DEVICE, HALF)
    counts_e = np.array([5])
    ours = experts()
    outs = []
    for kernel in (ours, TritonExperts()):
        kernel.run(
            Inbound(Layout.GROUPED, x, counts_e, counts_e),
            kernel.pack(w),
            out := torch.empty_like(x),
        )
        outs.append(out)
    assert close(*outs)
    assert ours.caps.width_step == 8


def test_weights_in_blocks(package: Any) -> None:
    """Scales change places with their rows. It rounds rows by itself, so they arrive in 16 bits."""
    w = weights("fp8 in blocks")
    ours = experts(blocks=True)
    packed = ours.pack(w)
    counts_e = np.array([3, 0, 17, 1])
    assert isinstance(packed.w13, Scaled)
    assert (ours.caps.width_step, ours.caps.dtypes) == (128, {"bfloat16"})
    x = rows(21, dtype=torch.bfloat16)
    ours.run(
        Inbound(Layout.GROUPED, x, counts_e, counts_e.cumsum()),
        packed,
        found := torch.empty_like(x),
    )
    expected = torch.empty(x.shape, device=DEVICE)
    TritonExperts().run(
        Inbound(Layout.GROUPED, x.float(), counts_e, counts_e.cumsum()),
        TritonExperts().pack(w),
        expected,
    )
    assert close(found, expected, 5e-2)
    assert FOUND == [(21, 1)]


@pytest.mark.parametrize("blocks", [False, True])
def test_an_expert_moves_in_one_piece(package: Any, blocks: bool) -> None:
    """put, take and stack equal packing the weights together, with up rows first."""
    ours = experts(blocks=blocks)
    a, b = (weights("fp8 in blocks", seed) if blocks else plain(seed=seed) for seed in (0, 7))
    whole = ours.pack(a)
    other = ours.pack(b)
    ours.put(whole, 1, ours.pack_expert(b.w13_eFD[1], b.w2_eDI[1]))
    stacked = ours.stack([ours.take(whole, 1), ours.take(other, 0)])
    for part, theirs, new in zip(whole.parts, other.parts, stacked.parts, strict=True):
        assert torch.equal(part[1].view(torch.uint8), theirs[1].view(torch.uint8))
        assert torch.equal(new.view(torch.uint8), theirs[[1, 0]].view(torch.uint8))


def test_it_runs_where_it_was_measured_to_be_faster(package: Any, tmp_path: Path) -> None:
    """Elsewhere Triton's kernels do, over weights with up rows first, in the bits that they have of
    gate rows first; and nowhere for kernels whose bits must not depend on the batch, which read the
    same table."""
    name = configs.facts_of(DEVICE).name
    shape = shape_of(*SIZES, HALF)
    configs.save(
        "grouped_gemm",
        name,
        shape,
        {4: {"block_m": 16}, 1000: {"block_m": 32, **flashinfer_moe.FASTER}},
        tmp_path,
    )
    assert not flashinfer_moe.is_faster(DEVICE, *SIZES, HALF)
    configs.add_folder(tmp_path)
    assert flashinfer_moe.is_faster(DEVICE, *SIZES, HALF)
    assert not flashinfer_moe.is_faster(DEVICE, *SIZES, torch.bfloat16)
    ours = experts(is_chosen=False)
    triton = TritonExperts()
    w = plain()
    for count in (1, 100):
        x = rows(4 * count)
        counts_e = np.array([count] * 4)
        outs = []
        for kernel in (ours, triton):
            kernel.run(
                Inbound(Layout.GROUPED, x, counts_e, counts_e.cumsum()),
                kernel.pack(w),
                out := torch.empty_like(x),
            )
            outs.append(out)
        assert [(400, 1)] * (count == 100) == FOUND
        assert torch.equal(*outs) if count == 1 else close(*outs)


def test_what_is_in_the_way(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")

    def why(*changes: Any, **more: Any) -> str:
        given: dict[str, Any] = {
            "device": cuda,
            "is_chosen": True,
            "blocks": False,
            "exact": False,
            "sizes": SIZES,
        }
        flashinfer_moe.unsupported_reason.cache_clear()
        return str(FlashInferExperts(**(given | {"dtype": HALF} | more)).caps.obstacle)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        flashinfer_moe, "facts_of", lambda device: configs.DeviceFacts("NVIDIA H100 80GB HBM3", 132)
    )
    assert why() == why(blocks=True) == "None"
    assert "SwiGLU alone" in why(swiglu=False)
    assert "--determinism fast" in why(exact=True)
    assert "`moeserve tune` finds out" in why(is_chosen=False)
    assert "Hopper or newer, not on cpu" in why(device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert why() == "None"
    assert "on Hopper, not on cuda" in why(blocks=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "Hopper or newer, not on cuda" in why()
    package.cutlass_fused_moe.__signature__ = signature_of("flashinfer 0.5.3")
    assert "takes no use_fused_finalize; 0.7.2 does" in why()
    del package.cutlass_fused_moe
    assert "cannot be imported: AttributeError" in why()
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", None)
    assert "cannot be imported: ModuleNotFoundError" in why()
    with pytest.raises(ConfigError, match="16 bits or e4m3 blocks"):
        experts().pack(weights("int4"))
    kept = experts(is_chosen=False).pack(weights("int4"))
    assert not kept.kernels.flashinfer


def test_the_plan_says_why_not(package: Any) -> None:
    needs = MoENeeds(
        hidden_size=D, expert_size=I, dtype="float16", device=DEVICE.type, max_tokens=8
    )
    ours = experts()
    local = [LocalAll2All(E)]
    triton = TritonExperts()
    plan = plan_moe(needs, local, [ours, triton])
    assert (plan.experts, plan.fused) == (ours, True)
    slots = LocalAll2All(E)
    groups = LocalAll2All(E)
    slots.caps = replace(
        slots.caps, layouts=frozenset({Layout.SLOTTED}), device_counts=True, in_place=False
    )
    groups.caps = replace(groups.caps, in_place=False)
    apart = plan_moe(needs, [groups], [ours])
    assert not apart.fused
    assert type(apart.layer(SimpleNamespace(rule=RouterRule()), None, None)) is MoELayer  # type: ignore[arg-type]
    for changes, backends, why in (
        ({"biases": True}, local, "flashinfer takes no experts with biases"),
        ({"gated": False}, local, "flashinfer takes no experts without gates"),
        ({"dtype": "float32"}, local, "flashinfer does not compute in float32"),
        ({"expert_size": 4}, local, "flashinfer takes multiples of 8"),
        ({}, [slots], "local and flashinfer share no layout"),
    ):
        with pytest.raises(ConfigError, match=why):
            plan_moe(replace(needs, **changes), backends, [ours])  # type: ignore[arg-type]


def test_tuning_times_it_beside_ours(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(tuning, "TOKENS", (3,))

    def job(dtype: torch.dtype = HALF, kind: str = "plain") -> tuning.Job:
        (found,) = tuning.grouped_jobs(2, 128, 128, 2, dtype, DEVICE, kind)
        return found

    assert job().rival is None
    monkeypatch.setattr(flashinfer_moe, "unsupported_reason", lambda device, blocks: None)
    assert [job(torch.float32).rival, job(kind="int8").rival, job(kind="fp8").rival] == [None] * 3
    ours = job()
    assert ours.rival is not None
    ours.run(ours.default)
    assert not FOUND
    assert ours.run({**ours.default, **ours.rival}).shape == (3, 128)
    assert FOUND == [(3, 2)]
    times = iter([5.0, 1.0])
    found = tuning.search(replace(ours, choices={}), lambda run: next(times))
    assert found.config == {**ours.default, **flashinfer_moe.FASTER}
    assert found.best_ms == 1.0


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there it may be installed, and Triton is not interpreted"
)
def test_a_model_is_refused_or_served_without_it(
    make_checkpoint: Any, tmp_path: Path, caplog: Any
) -> None:
    path = make_checkpoint(
        "qwen3_moe", num_hidden_layers=1, hidden_size=128, moe_intermediate_size=128
    ).path
    with pytest.raises(ConfigError, match="flashinfer cannot be imported"):
        load(path, kernels="flashinfer")
    stored, _ = write_quantized(path, tmp_path, FORMS["fp8 in blocks"])
    with pytest.raises(ConfigError, match="flashinfer cannot be imported"):
        load(stored, kernels="flashinfer")
    with caplog.at_level(logging.DEBUG, "moeserve.models.build"):
        load(path, kernels="triton")
    assert flashinfer_moe.NOT_MEASURED in caplog.text
