"""`moeserve tune`: measures launch parameters of the GPU kernels for a model's shapes, and stores
the fastest.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moeserve.errors import ConfigError
from moeserve.version import __version__

if TYPE_CHECKING:
    import torch

    from moeserve.kernels.cost import Facts
    from moeserve.kernels.tuning import Job, Key, Maker, SearchResult, Timer
    from moeserve.models.spec import ModelSpec

FAMILIES = ("grouped_gemm", "linear", "paged_attention")
DTYPES = ("bfloat16", "float16", "float32")
# Formats of expert weights. The experts' widths must be multiples of these numbers.
WEIGHTS = {"plain": 1, "fp8": 128, "int8": 16, "int4": 128, "fp4": 64}
BLOCK_SIZE = 16
MAX_COMPILERS = 16  # processes, each of which takes half a gigabyte
COMMON = {  # the expert shapes and weight formats that --all measures
    "Qwen3-30B-A3B": ("E128 I768 D2048 K8", "plain"),
    "Qwen3-235B-A22B": ("E128 I1536 D4096 K8", "plain"),
    "DeepSeek-V3": ("E256 I2048 D7168 K8", "fp8"),
    "gpt-oss-20b": ("E32 I2880 D2880 K4", "fp4"),
    "gpt-oss-120b": ("E128 I2880 D2880 K4", "fp4"),
    "DeepSeek-V2-Lite": ("E64 I1408 D2048 K6", "plain"),
    "Mixtral-8x7B": ("E8 I14336 D4096 K2", "plain"),
    "GLM-4.5-Air": ("E128 I1408 D4096 K8", "plain"),
}
_SHAPE = re.compile(r"E(\d+) +I(\d+) +D(\d+) +K(\d+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: a model or its shape, and the kernels to measure."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="model directory; only its config.json is read"
    )
    parser.add_argument(
        "--shape",
        metavar="'E128 I768 D2048 K8'",
        help="in place of MODEL: experts, expert width, model width, top-k",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of weights and activations [the model's, or bfloat16]",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="format of expert weights; fp8: 128 x 128 blocks, fp4: MXFP4 [plain: 16 bits]",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="tune the expert shapes of common models, measuring only the best predictions",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        metavar="N",
        help="time limit of --all; run the command again to continue [8]",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the tables and their origins, and exit"
    )
    parser.add_argument("--only", choices=FAMILIES, help="tune one family of kernels only")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write the tables to this folder [the user's cache, which kernels read]",
    )


def run(args: argparse.Namespace) -> int:
    """Measure on the current GPU. Raises ConfigError if there is none."""
    from moeserve.kernels.configs import FOLDER, listing, user_folder

    folder = args.out or user_folder()
    if args.list:
        lines = [*listing(folder), *listing(FOLDER)]
        print("\n".join(lines) or "there are no tables")
        return 0
    experts = read_shape(args.shape) if args.shape else None
    num_sources = sum((args.model is not None, experts is not None, args.all))
    if num_sources != 1:
        raise ConfigError("tune needs a model directory or --shape or --all, and only one of them")
    if args.all and (args.weights or args.only):
        raise ConfigError(
            "--all chooses kernels and weight formats itself: omit --weights and --only"
        )
    if not 0 < args.minutes < math.inf:
        raise ConfigError(f"--minutes must be above 0, got {args.minutes:g}")
    from moeserve.models.fetch import fetch_config
    from moeserve.models.hf_config import read_model_spec

    spec = read_model_spec(fetch_config(args.model)) if args.model else None
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"tune needs a GPU, but torch {torch.__version__} finds none")
    from triton.testing import do_bench

    dtype = getattr(torch, args.dtype or (spec.dtype if spec else "bfloat16"))
    device = torch.device("cuda", torch.cuda.current_device())
    shapes_and_weights = [(experts, args.weights or "plain")]
    only = args.only
    durations_ms = {}  # by default those of do_bench
    if args.all:
        shapes_and_weights = [(read_shape(shape), weights) for shape, weights in COMMON.values()]
        only = "grouped_gemm"
        durations_ms = {"warmup": 10, "rep": 40}
    makers = [
        make
        for shape, weights in shapes_and_weights
        for make in makers_of(spec, shape, dtype, only, weights)
    ]
    timer = partial(do_bench, return_mode="median", **durations_ms)
    return tune(makers, timer, device, folder, args.minutes if args.all else None)


class ExpertShapes(NamedTuple):
    """The shape of a layer's experts."""

    num_experts: int
    width: int  # intermediate size of an expert
    dim: int  # hidden size of the model
    top_k: int


def read_shape(text: str) -> ExpertShapes:
    """Parse 'E128 I768 D2048 K8' as ExpertShapes(128, 768, 2048, 8). Raises ConfigError."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--shape {text!r} is not like 'E128 I768 D2048 K8'")
    shapes = ExpertShapes(*map(int, match.groups()))
    if not 0 < shapes.top_k <= shapes.num_experts or not shapes.width or not shapes.dim:
        raise ConfigError(f"--shape {text!r}: no size may be 0, and K may not be more than E")
    return shapes


def linear_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of each dense matrix product of a model on one rank."""
    return list(dict.fromkeys([*spec.products(), (spec.vocab_size, spec.hidden_size)]))


def makers_of(
    spec: ModelSpec | None,
    experts: ExpertShapes | None,
    dtype: torch.dtype,
    only: str | None,
    weights: str,
) -> Iterator[Maker]:
    """Yield makers of tuning jobs: grouped expert products, dense products and attention, or only
    the family `only`.
    """
    from moeserve.kernels import tuning
    from moeserve.kernels.paged_attention import AttentionShape

    if experts is None and spec is not None and spec.num_experts:
        experts = ExpertShapes(
            spec.num_experts, spec.expert_size, spec.hidden_size, spec.experts_per_token
        )
    if experts is not None and only in (None, "grouped_gemm"):
        divisor = WEIGHTS[weights]
        if experts.width % divisor or experts.dim % divisor:
            raise ConfigError(
                f"--weights {weights} needs widths that are multiples of {divisor}, got"
                f" {experts.width} and {experts.dim}"
            )
        yield partial(tuning.grouped_jobs, *experts, dtype, kind=weights)
    if spec is not None and only in (None, "linear"):
        for shape in linear_shapes(spec):
            yield partial(tuning.linear_jobs, *shape, dtype)
    if spec is not None and only in (None, "paged_attention"):
        for heads in dict.fromkeys(layer.mixer.head_shape(1) for layer in spec.layers):
            if heads is not None:
                sizes = (heads.num_heads, heads.num_kv_heads, heads.dim, heads.v_dim)
                yield partial(tuning.attention_jobs, AttentionShape(*sizes, BLOCK_SIZE, dtype))


def compile_ahead(make: Maker, job: Job) -> dict[Key, Facts]:
    """Compile the kernels of a job's candidates in processes, into Triton's cache.

    Returns facts about the compiled kernels; none for kernels without a cost model.
    """
    from moeserve.kernels import cost, tuning

    facts: dict[Key, Facts] = {}
    if job.products:
        num_workers = min(MAX_COMPILERS, os.cpu_count() or 1)
        compile_variant = partial(tuning.compile_variant, make)
        with ProcessPoolExecutor(num_workers, get_context("spawn"), cost.compile_only) as pool:
            for new_facts in pool.map(compile_variant, tuning.variants(job), chunksize=4):
                facts |= new_facts
    return facts


def tune(
    makers: Sequence[Maker],
    timer: Timer,
    device: torch.device,
    folder: Path,
    minutes: float | None = None,
) -> int:
    """Measure, and write each result at once, so that an interrupted search loses nothing.

    Return the exit code.

    Args:
        makers: See `makers_of`.
        timer: Returns the milliseconds of a kernel.
        device: The GPU.
        folder: The folder of the tables.
        minutes: Measure for this long, and only the configurations with the best predictions of
            entries that this version has not measured yet.
    """
    import triton

    from moeserve.kernels.configs import facts_of, save
    from moeserve.kernels.cost import CARDS
    from moeserve.kernels.tuning import NUM_PASSES, ranked, search

    gpu = facts_of(device).name
    measured_by = f"moeserve {__version__}, triton {triton.__version__}"
    begun_at_s = time.monotonic()
    card = CARDS.get(gpu)  # the GPU's cost model
    paths = set()
    num_jobs = 0
    if card is None:
        print(
            f"no cost model of {gpu!r}, only of {', '.join(CARDS)}: searching longer, from the "
            "defaults",
            flush=True,
        )
    for make in makers:
        facts: dict[Key, Facts] | None = None
        for job in make(device=device):
            num_jobs += 1
            if minutes is not None:
                if _is_measured(job, gpu, folder, measured_by):
                    continue
                if time.monotonic() - begun_at_s > 60 * minutes:
                    print(f"{minutes:g} minutes are over; run the same command to continue")
                    return 0
            if facts is None:  # once for all jobs of a maker
                facts = compile_ahead(make, job) if card else {}
            predicted_best = ranked(job, facts, card) if card and facts else []
            num_passes = NUM_PASSES
            if predicted_best:  # they need a short search, or none
                num_passes = 1 if minutes is None else 0
            result = search(job, timer, predicted_best, num_passes)
            paths.add(
                save(job.family, gpu, job.shape, {job.size: result.config}, folder, measured_by)
            )
            _print_result(job, result)
    if not num_jobs:
        raise ConfigError("nothing to tune: the shape has no kernel of that family")
    written = "\n".join(f"written: {path}" for path in sorted(paths))
    print(written or "everything is already measured")
    return 0


def _is_measured(job: Job, gpu: str, folder: Path, measured_by: str) -> bool:
    """Return whether the tables have the job's configuration by these versions."""
    from moeserve.kernels.configs import table

    entry = table(job.family, gpu, folder).get(job.shape, {}).get(job.size, {})
    return str(entry.get("by")) == measured_by


def _print_result(job: Job, result: SearchResult) -> None:
    gain = result.default_ms / result.best_ms
    print(
        f"{job.family} {job.shape}, {job.size}: {result.default_ms:.4f} ->"
        f" {result.best_ms:.4f} ms ({gain:.2f} x), {result.num_tried} tried",
        flush=True,
    )
    for config in result.wrong_configs:
        print(f"  dropped, because its bits differ: {dict(config)}", flush=True)
