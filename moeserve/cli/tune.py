"""`moeserve tune`: measures launch parameters of the GPU kernels for a model's shapes and keeps the best."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moeserve.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from moeserve.kernels.tuning import Job, Timer
    from moeserve.models.spec import ModelSpec

FAMILIES = ("grouped_gemm", "linear", "paged_attention")
DTYPES = ("bfloat16", "float16", "float32")
WEIGHTS = {"plain": 1, "fp8": 128, "int8": 16, "int4": 128}  # of which the experts' widths are multiples
BLOCK_SIZE = 16
_SHAPE = re.compile(r"E(\d+) +I(\d+) +D(\d+) +K(\d+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model or its shape, and what to measure."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model directory; only its config.json is read")
    parser.add_argument("--shape", metavar="'E128 I768 D2048 K8'", help="experts, their width, model width, top-k")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of weights and activations [the model's own, or bfloat16]"
    )
    parser.add_argument("--weights", choices=WEIGHTS, help="weights of experts; fp8: in blocks of 128 x 128 [16 bits]")
    parser.add_argument("--only", choices=FAMILIES, help="one family of kernels")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the tables [the user's cache, where kernels find them]"
    )


def run(args: argparse.Namespace) -> int:
    """Measures on the present GPU. Raises ConfigError if there is none."""
    experts = read_shape(args.shape) if args.shape else None
    if (args.model is None) == (experts is None):
        raise ConfigError("tune needs a model directory or --shape, and not both")
    from moeserve.loader.model_dir import resolve_model_dir
    from moeserve.models.hf_config import read_model_spec

    spec = read_model_spec(resolve_model_dir(args.model)) if args.model else None
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"tune measures on a GPU, and torch {torch.__version__} sees none")
    from triton.testing import do_bench

    from moeserve.kernels.configs import user_folder

    dtype = getattr(torch, args.dtype or (spec.dtype if spec else "bfloat16"))
    device = torch.device("cuda", torch.cuda.current_device())
    jobs = jobs_of(spec, experts, dtype, device, args.only, args.weights or "plain")
    return tune(jobs, lambda call: float(do_bench(call, return_mode="median")), device, args.out or user_folder())


class ExpertShapes(NamedTuple):
    """The experts of a layer: how many, their inner width, the model's width, and experts per token."""

    num_experts: int
    width: int
    dim: int
    top_k: int


def read_shape(text: str) -> ExpertShapes:
    """Parses a shape: 'E128 I768 D2048 K8' -> ExpertShapes(128, 768, 2048, 8). Raises ConfigError."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--shape {text!r} is not like 'E128 I768 D2048 K8'")
    found = ExpertShapes(*map(int, match.groups()))
    if not 0 < found.top_k <= found.num_experts or not found.width or not found.dim:
        raise ConfigError(f"--shape {text!r}: no size may be 0, and K may not be more than E")
    return found


def linear_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """Returns (outputs, inputs) of a model's dense products on one rank."""
    return list(dict.fromkeys([*spec.products(), (spec.vocab_size, spec.hidden_size)]))


def jobs_of(
    spec: ModelSpec | None,
    experts: ExpertShapes | None,
    dtype: torch.dtype,
    device: torch.device,
    only: str | None,
    weights: str,
) -> Iterator[Job]:
    """Yields what to measure: grouped products of experts, dense products, attention; `only` names one of them."""
    from moeserve.kernels import tuning
    from moeserve.kernels.paged_attention import AttentionShape

    if experts is None and spec is not None and spec.num_experts:
        experts = ExpertShapes(spec.num_experts, spec.expert_size, spec.hidden_size, spec.experts_per_token)
    if experts is not None and only in (None, "grouped_gemm"):
        if experts.width % WEIGHTS[weights] or experts.dim % WEIGHTS[weights]:
            sizes = f"{WEIGHTS[weights]}s, and these are {experts.width} and {experts.dim}"
            raise ConfigError(f"--weights {weights} takes widths of {sizes}")
        yield from tuning.grouped_jobs(*experts, dtype, device, weights)
    if spec is not None and only in (None, "linear"):
        for shape in linear_shapes(spec):
            yield from tuning.linear_jobs(*shape, dtype, device)
    if spec is not None and only in (None, "paged_attention"):
        for heads in dict.fromkeys(layer.mixer.head_shape(1) for layer in spec.layers):
            if heads is not None:
                widths = heads.num_heads, heads.num_kv_heads, heads.dim, heads.v_dim
                attention = AttentionShape(*widths, BLOCK_SIZE, dtype)
                yield from tuning.attention_jobs(attention, device)


def tune(jobs: Iterator[Job], timer: Timer, device: torch.device, folder: Path) -> int:
    """Runs the jobs and writes each result as soon as it is there, so that an interrupted search is not lost."""
    from moeserve.kernels.configs import facts_of, keep
    from moeserve.kernels.tuning import search

    paths = set()
    for job in jobs:
        found = search(job, timer)
        paths.add(keep(job.family, facts_of(device).name, job.shape, {job.size: found.config}, folder))
        gain = found.default_ms / found.best_ms
        print(f"{job.family} {job.shape}, {job.size}: {found.default_ms:.4f} -> {found.best_ms:.4f} ms ({gain:.2f} x), "
              f"{found.tried} tried", flush=True)  # fmt: skip
        for config in found.wrong:
            print(f"  dropped, other bits: {dict(config)}", flush=True)
    if not paths:
        raise ConfigError("nothing to tune: the shape has no kernel of that family")
    print("\n".join(f"written: {path}" for path in sorted(paths)))
    return 0
