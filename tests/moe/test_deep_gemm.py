"""Experts by DeepGEMM: the adapter over a stand-in that has the package's recorded signatures and
checks what its own host code checks (csrc/apis/gemm.hpp); and when it is chosen. The package itself
runs on Hopper alone.

tools/record_deepgemm.py records another release.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moeserve.errors import ConfigError
from moeserve.kernels import configs, deep_gemm, tuning
from moeserve.kernels.align import align, combine
from moeserve.kernels.fp8 import E4M3
from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.triton import DeepGemmExperts, TritonExperts
from moeserve.moe.plan import MoENeeds, plan_moe
from moeserve.ops.rules import Activation
from moeserve.ops.triton_weights import W8A8
from tests.kernels.device import DEVICE
from tests.moe.test_triton_experts import D, E, I, _as_on_a_gpu, weights
from tests.quantized_checkpoints import FORMS, write_quantized
from tests.runner.test_quantized import load
from tools.gpu.references import quantize_reference
from tools.record_deepgemm import bound

assert _as_on_a_gpu  # for all tests here, too
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # of NumPy, for undefined rows
RELEASES: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("deep_gemm_signatures.json").read_text()
)
NEW = [name for name, functions in RELEASES.items() if deep_gemm.MASKED in functions]
SIZES = (E, I, D)
FOUND: list[int] = []  # rows of each product


def product(a: Any, b: Any, d: Tensor, grouped_layout: Tensor) -> None:
    """The definition, by tiles of 128 rows; those of expert -1 stay as they are."""
    (x, x_scales), (w, w_scales) = a, b
    (m, k), (groups, n, k_) = x.shape, w.shape
    assert (m, n, k) == (*d.shape, k_)
    assert grouped_layout.shape == (m,)
    assert (x.dtype, w.dtype, d.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)
    assert x_scales.shape == (m, -(-k // 128))
    assert w_scales.shape == (groups, -(-n // 128), -(-k // 128))
    assert x_scales.dtype == w_scales.dtype == torch.float32
    assert grouped_layout.dtype == torch.int32
    assert all(part.is_contiguous() for part in (x, w, d, x_scales, w_scales, grouped_layout))
    FOUND.append(m)
    d.fill_(torch.nan)
    for tile, experts in enumerate(grouped_layout.view(-1, 128)):
        assert experts.unique().numel() == 1
        if (expert := int(experts[0])) >= 0:
            rows = slice(128 * tile, 128 * tile + 128)
            wide_x = x[rows].float() * x_scales[rows].repeat_interleave(128, 1)[:, :k]
            scales = w_scales[expert].repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
            d[rows] = (wide_x @ (w[expert].float() * scales).T).bfloat16()


def masked(a: Any, b: Any, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
    """The definition, for slots: rows from masked_m on are neither read nor zeroed. Whole tiles are
    written, what does not fit into an expert's slots over the next one's
    (csrc/jit_kernels/impls/runtime_utils.hpp, make_tma_cd_desc)."""
    (x, x_scales), (w, w_scales) = a, b
    (groups, m, k), n = x.shape, w.shape[1]
    assert (w.shape, d.shape, masked_m.shape) == ((groups, n, k), (groups, m, n), (groups,))
    assert (x.dtype, w.dtype, d.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)
    assert x_scales.shape == (groups, m, -(-k // 128))
    assert w_scales.shape == (groups, -(-n // 128), -(-k // 128))
    assert x_scales.dtype == w_scales.dtype == torch.float32
    assert masked_m.dtype == torch.int32
    assert isinstance(expected_m, int)
    assert expected_m > 0 < m
    assert all(part.is_contiguous() for part in (x, w, d, w_scales, masked_m))
    assert bool((masked_m <= m).all())
    FOUND.append(m)
    flat = d.view(-1, n).fill_(torch.nan)
    for group in reversed(range(groups)):
        for row in range(0, int(masked_m[group]), 128):
            tile = slice(row, min(row + 128, m))
            rows = min(128, int(masked_m[group]) - row)
            wide_x = x[group, tile].float() * x_scales[group, tile].repeat_interleave(128, 1)[:, :k]
            scales = w_scales[group].repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
            part = flat[group * m + row : group * m + row + 128].fill_(torch.nan)
            padded = torch.nn.functional.pad(wide_x[:rows], (0, 0, 0, 128 - rows))
            part[:rows] = (padded @ (w[group].float() * scales).T)[:rows].bfloat16()


@pytest.fixture(params=NEW)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """In place of deep_gemm."""

    def called(name: str, definition: Callable[..., None]) -> Callable[..., None]:
        space: dict[str, Any] = {}
        exec(f"def recorded({RELEASES[request.param][name]}): ...", space)
        signature = inspect.signature(space["recorded"])

        def call(*args: Any, **options: Any) -> None:
            given = signature.bind(*args, **options).arguments
            assert set(given) == set(inspect.signature(definition).parameters), (
                "the stand-in knows no options"
            )
            definition(**given)

        return call

    definitions = {deep_gemm.PRODUCT: product, deep_gemm.MASKED: masked}
    made = SimpleNamespace(
        __version__="2.6.1", **{name: called(name, of) for name, of in definitions.items()}
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", made)
    monkeypatch.setattr(configs, "_folders", [configs.FOLDER])
    caches = (deep_gemm.unsupported_reason, configs.table)
    for cached in caches:
        cached.cache_clear()
    yield made
    for cached in caches:
        cached.cache_clear()


def close(found: Tensor, expected: Tensor) -> bool:
    """Gate and up are rounded to bf16, and their product then to e4m3, maybe to its other side: one
    part in 8 or 16.
    """
    return bool((found - expected).norm() <= 2e-2 * expected.norm())


def experts(activation: Activation | None = None) -> tuple[Any, Any]:
    ours = DeepGemmExperts(DEVICE, is_chosen=True, blocks=True, exact=False, sizes=SIZES)
    return tuple(
        one.with_activation(activation) if activation else one for one in (ours, TritonExperts())
    )


@pytest.mark.parametrize(
    "activation",
    [None, Activation(alpha=1.702, limit=1.0, up_shift=1.0)],
    ids=["swiglu", "clamped"],
)
@pytest.mark.parametrize("counts", [[3, 0, 130, 1], [0] * 4, [128, 1, 0, 0]], ids=str)
def test_rows_of_both_layouts(
    package: Any, counts: list[int], activation: Activation | None
) -> None:
    """In slots by the masked product, if they hold whole tiles."""
    (ours, triton), w = experts(activation), weights("fp8 in blocks")
    x = (
        torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(5))
        .bfloat16()
        .float()
        .to(DEVICE)
    )
    counts_e = np.array(counts)
    expected = torch.empty_like(x)
    found = torch.empty_like(x)
    triton.run(Inbound(Layout.GROUPED, x, counts_e, counts_e.cumsum()), triton.pack(w), expected)
    FOUND.clear()
    ours.run(Inbound(Layout.GROUPED, x, counts_e, counts_e.cumsum()), packed := ours.pack(w), found)
    assert len(FOUND) == (2 if sum(counts) else 0)
    assert close(found, expected)
    on_device = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    most = max(counts)
    for room, dtype in ((most, torch.float32), (max(128, -(-most // 128) * 128), torch.bfloat16)):
        valid = torch.arange(room, device=DEVICE) < on_device[:, None]
        slots = torch.full((E, room, D), torch.nan, dtype=dtype, device=DEVICE)
        slots[valid], out = x.to(dtype), torch.empty_like(slots)
        FOUND.clear()
        ours.run(Inbound(Layout.SLOTTED, slots, on_device, on_device, 30, sum(counts)), packed, out)
        assert torch.equal(out[valid].float(), found)
        assert room % 128 or not room or 2 * [room] == FOUND


def slotted(x_eCD: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 rows as DeepEP's kernels do, with transposed scales."""
    values, scales = (
        part.unflatten(0, x_eCD.shape[:2]) for part in quantize_reference(x_eCD.flatten(0, 1))
    )
    return values, scales.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("which", "counts", "room"),
    [
        (1, [3, 0, 20, 1], 20),
        (1, [0] * 4, 20),
        (0, [0, 2, 0, 1], 20),
        (0, [0, 2, 0, 1], 128),
        (0, [0, 0, 2, 0], 128),
    ],
    ids=str,
)
def test_rows_as_they_travelled(
    package: Any, which: int, counts: list[int], room: int, cut: bool
) -> None:
    """The bits of rows that are rounded here, once; nothing is read beyond the counts. Also cut out
    of wider ones.
    """
    kernel = experts()[which]
    counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    packed = kernel.pack(weights("fp8 in blocks"))
    valid = torch.arange(room, device=DEVICE) < counts_e[:, None]
    x = torch.randn(E, room, 2 * D if cut else D, generator=torch.Generator().manual_seed(5)).to(
        DEVICE
    )
    values, scales = slotted(x)
    values.view(torch.uint8)[~valid] = 0x7F
    scales[~valid] = torch.nan
    outs = [torch.full((E, room, D), 7.0, device=DEVICE) for _ in range(2)]
    sent = Inbound(
        Layout.SLOTTED,
        values[..., :D],
        counts_e,
        counts_e,
        30,
        sum(counts),
        scales[..., : D // 128],
    )
    kernel.run(sent, packed, outs[0])
    kernel.run(replace(sent, rows=x[..., :D].contiguous(), scales=None), packed, outs[1])
    assert torch.equal(*(out[valid] for out in outs))
    assert outs[0][valid].isfinite().all()


@pytest.mark.parametrize(("which", "room"), [(1, 20), (0, 20), (0, 128)])
def test_one_expert_and_rows_in_groups(package: Any, which: int, room: int) -> None:
    """Strides of a single expert's scales are those of a transposed matrix; rows in groups bring
    scales, too.
    """
    kernel = experts()[which]
    x = torch.randn(1, room, D, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    rows, scales = slotted(x)
    packed = kernel.take(kernel.pack(weights("fp8 in blocks")), 1)
    counts_e = torch.tensor([17], dtype=torch.int32, device=DEVICE)
    on_host = np.array([17])
    out = torch.empty_like(x)
    grouped = torch.empty(17, D, device=DEVICE)
    rounded = torch.empty(17, D, device=DEVICE)
    kernel.run(Inbound(Layout.SLOTTED, rows, counts_e, counts_e, 30, 17, scales), packed, out)
    kernel.run(
        Inbound(Layout.GROUPED, rows[0, :17], on_host, on_host, scales=scales[0, :17]),
        packed,
        grouped,
    )
    kernel.run(Inbound(Layout.GROUPED, x[0, :17], on_host, on_host), packed, rounded)
    assert torch.equal(out[0, :17], grouped)
    assert torch.equal(grouped, rounded)


def test_rounding_twice() -> None:
    """Rows are bf16 where no product takes fp8, and are rounded again where one does.

    The bits stay the same if scales are powers of two.
    """
    w = weights("fp8 in blocks")
    triton = TritonExperts()
    packed = triton.pack(w)
    counts_e = torch.full((E,), 20, dtype=torch.int32, device=DEVICE)
    x = torch.randn(E, 20, D, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    once = torch.empty_like(x)
    twice = torch.empty_like(x)
    values, scales = slotted(x)
    powers = 2.0 ** scales.log2().round()
    for factor in (scales, powers):
        values.view(torch.uint8)[..., 0] = (
            torch.tensor(448.0).to(E4M3).view(torch.uint8)
        )  # as the largest of a block is
        sent = Inbound(Layout.SLOTTED, values, counts_e, counts_e, scales=factor)
        triton.run(sent, packed, once)
        triton.run(replace(sent, rows=sent.x, scales=None), packed, twice)
        assert torch.equal(once, twice) == (factor is powers)


def test_choices_of_a_router(package: Any) -> None:
    """Pairs that go nowhere among them."""
    ours, triton = experts()
    w = weights("fp8 in blocks")
    ids = torch.tensor([[0, 3], [-1, 1], [3, 2], [-1, -1], [1, 0]], dtype=torch.int32)
    ids, shares = (
        ids.to(DEVICE),
        torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE),
    )
    x = torch.randn(len(ids), D, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    results = []
    for kernel in (ours, triton):
        packed = kernel.pack(w)
        config = packed.launch(ids.numel(), x)
        y = x.new_zeros((ids.numel(), D))
        packed.run(x, align(ids, E, config["block_m"]), config, y, 2)
        results.append(combine(y.view(*ids.shape, D), shares, ids))
    assert close(*results)
    assert not results[0][3].any()


def test_weights_are_those_of_triton(package: Any) -> None:
    """The same layout, which serves whatever a launch chooses; other weights keep their kernels."""
    (ours, triton), w = experts(), weights("fp8 in blocks")
    for mine, theirs in zip(ours.pack(w).parts, triton.pack(w).parts, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert ours.pack(weights("int4")).kernels is triton.pack(weights("int4")).kernels


def test_what_is_in_the_way(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")

    def why(**changes: Any) -> str | None:
        given: dict[str, Any] = {
            "device": cuda,
            "is_chosen": True,
            "blocks": True,
            "exact": False,
            "sizes": SIZES,
        }
        deep_gemm.unsupported_reason.cache_clear()
        return DeepGemmExperts(**(given | changes)).caps.obstacle

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        deep_gemm, "facts_of", lambda device: configs.DeviceFacts("NVIDIA H100 80GB HBM3", 132)
    )
    assert why() is None
    assert "e4m3 blocks of 128 x 128" in str(why(blocks=False))
    assert "--determinism fast" in str(why(exact=True))
    assert "moeserve tune --weights fp8" in str(why(is_chosen=False))
    assert "Hopper only, not on cpu" in str(why(device=torch.device("cpu")))
    package.get_mk_alignment_for_contiguous_layout = lambda: 240
    assert "needs tiles of 240 rows" in str(why())
    package.get_mk_alignment_for_contiguous_layout = lambda: 64
    assert why() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "Hopper only" in str(why())
    old = SimpleNamespace(**dict.fromkeys(RELEASES["deep_gemm 1.0.0"]), __version__="1.0.0")
    monkeypatch.setitem(sys.modules, "deep_gemm", old)
    assert f"deep_gemm 1.0.0 has no {deep_gemm.PRODUCT}; a newer one has" in str(why())
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert "cannot be imported: ModuleNotFoundError" in str(why())


def test_the_plan_says_why_not() -> None:
    """The package is missing here; if requested by name it is not silently replaced."""
    needs = MoENeeds(
        hidden_size=D, expert_size=I, dtype="float32", device=DEVICE.type, max_tokens=8
    )
    ours = DeepGemmExperts(DEVICE, is_chosen=False, blocks=True, exact=False, sizes=SIZES)
    plan = plan_moe(needs, [LocalAll2All(E)], [ours, TritonExperts()])
    assert plan.experts.caps.name == "triton"
    assert "not measured to be faster" in plan.table()
    with pytest.raises(ConfigError, match="local with deep_gemm: deep_gemm was not measured"):
        plan_moe(needs, [LocalAll2All(E)], [ours])
    fit = replace(ours.caps, obstacle=None)
    ours.caps = fit
    assert plan_moe(needs, [LocalAll2All(E)], [ours, TritonExperts()]).experts is ours
    assert (
        plan_moe(replace(needs, biases=True), [LocalAll2All(E)], [ours, TritonExperts()]).experts
        is not ours
    )


def test_it_runs_where_it_was_measured_to_be_faster(package: Any, tmp_path: Path) -> None:
    """Batch-invariant kernels read the same table and must ignore DeepGEMM's entries."""
    name = configs.facts_of(DEVICE).name
    few = {"block_m": 16}
    many = {"block_m": 64, **deep_gemm.FASTER}
    configs.save("grouped_fp8", name, f"E{E} I{I} D{D}", {4: few, 1000: many}, tmp_path)
    assert not deep_gemm.is_faster(DEVICE, *SIZES)
    configs.add_folder(tmp_path)
    assert deep_gemm.is_faster(DEVICE, *SIZES)
    assert not deep_gemm.is_faster(DEVICE, E, I, 2 * D)
    ours = DeepGemmExperts(DEVICE, is_chosen=False, blocks=True, exact=False, sizes=SIZES)
    x = torch.zeros(1, D, device=DEVICE)
    W8A8.launch.__globals__["grouped_fp8"].launch_fp8_of.cache_clear()
    packed = ours.pack(weights("fp8 in blocks"))
    theirs = TritonExperts().pack(weights("fp8 in blocks"))
    assert [packed.launch(n, x)["block_m"] for n in (4, 1000)] == [16, deep_gemm.TILE]
    assert [theirs.launch(n, x)["block_m"] for n in (4, 1000)] == [16, 64]
    FOUND.clear()
    rows = torch.randn(4, D, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    counts_e = np.array([1, 1, 1, 1])
    outs = []
    for kernel, weight in ((ours, packed), (TritonExperts(), theirs)):
        kernel.run(
            Inbound(Layout.GROUPED, rows, counts_e, counts_e.cumsum()),
            weight,
            out := torch.empty_like(rows),
        )
        outs.append(out)
    assert torch.equal(*outs)
    assert not FOUND
    W8A8.launch.__globals__["grouped_fp8"].launch_fp8_of.cache_clear()


def test_tuning_times_it_beside_ours(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(tuning, "TOKENS", (3,))
    assert [
        job.rival for job in tuning.grouped_jobs(2, 128, 128, 2, torch.float32, DEVICE, "fp8")
    ] == [None]
    monkeypatch.setattr(deep_gemm, "unsupported_reason", lambda device: None)
    (job,) = tuning.grouped_jobs(2, 128, 128, 2, torch.float32, DEVICE, "fp8")
    FOUND.clear()
    ours = job.run(job.default).clone()
    assert not FOUND
    assert job.rival is not None
    assert close(job.run({**job.default, **job.rival}), ours)
    assert FOUND == [2 * 128] * 2  # a tile for each expert
    assert [
        job.rival for job in tuning.grouped_jobs(2, 128, 128, 2, torch.float32, DEVICE, "int8")
    ] == [None]


def test_bindings_are_read_as_python_has_them() -> None:
    text = (
        'm.def("f", &f, py::arg("a"), py::arg("b") = std::nullopt,\n py::arg("c") = true);\n'
        'm.attr("g") = m.attr("f");'
    )
    assert bound(text) == {"f": "a, b=None, c=True", "g": "a, b=None, c=True"}


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there it may be installed, and Triton is not interpreted"
)
def test_a_model_is_refused_or_served_without_it(
    make_checkpoint: Any, tmp_path: Path, caplog: Any
) -> None:
    path = make_checkpoint(
        "qwen3_moe", num_hidden_layers=1, hidden_size=128, moe_intermediate_size=128
    ).path
    with pytest.raises(ConfigError, match="deep_gemm takes experts in e4m3 blocks"):
        load(path, kernels="deep_gemm")
    stored, _ = write_quantized(path, tmp_path, FORMS["fp8 in blocks"])
    with pytest.raises(ConfigError, match="deep_gemm cannot be imported"):
        load(stored, kernels="deep_gemm")
    with caplog.at_level(logging.DEBUG, "moeserve.models.build"):
        load(stored, kernels="triton")
    assert deep_gemm.NOT_MEASURED in caplog.text
