"""Predictions of the kernel cost model (kernels/cost.py) beside times measured on H100 and H200.

    python -m benchmarks.cost                    # against the package aiconfigurator-core
    python -m benchmarks.cost --tables FOLDER    # against systems/data of a checkout of it
    python -m benchmarks.cost --vllm FOLDER      # also the order of vLLM's configurations
    python -m benchmarks.cost --write            # also write the predicted tables

No GPU is needed: Triton compiles for Hopper without one.

Level: the tables have times of vLLM's Triton kernels for experts. Their rows are spread evenly over
all experts, and so are the predicted ones. vLLM's times include an activation and a sum that are
not in the prediction, so levels compare only roughly. cost_attention.py does the same for
attention.

Order: vLLM's wheel (--vllm: the folder where it is unpacked) has launch parameters that were found
by measuring hundreds of them for each shape and number of tokens. Its kernel is compiled with every
set of parameters that won anywhere. The model should predict that those which won for a shape are
fast for it.

Tables: --write stores the parameters that are predicted to be best in kernels/configs/.

Prints and saves all ratios, rank correlations and predicted gains.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks import common, cost_attention
from moeserve.cli.tune import COMMON, ExpertShapes, compile_ahead, read_shape
from moeserve.errors import ConfigError
from moeserve.kernels import configs, cost, tuning
from moeserve.kernels.cost import CARDS, Facts, Product
from moeserve.plan.hardware import DEVICES
from moeserve.plan.tables import PACKAGE, read_tables
from tools.gpu.peers import TILE_KEYS, load_kernel

MEASURED_AS = {"plain": "bfloat16", "fp8": "fp8_block", "fp4": "w4a16_mxfp4"}
NEAREST = {
    "plain": "E128 I768 D2048 K8",
    "fp8": "E256 I2048 D7168 K8",
    "fp4": "E128 I2880 D2880 K4",
}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384)
TUNED = {
    "E128 I768 D2048 K8": "E=128,N=768",
    "E8 I14336 D4096 K2": "E=8,N=14336",
    "E8 I7168 D4096 K2": "E=8,N=7168",
    "E512 I512 D2048 K10": "E=512,N=512",
}
PARAMETERS = (*TILE_KEYS[:3], "num_warps", "num_stages", TILE_KEYS[3])
FACTS = cost_attention.FACTS
CHECKED = ("plain",)  # formats of weights for which the predicted order matches a card's,
FROM = 256  # with so many tokens or more
GAIN = 1.05  # least predicted gain for which a table's entry differs from the defaults


class Balanced(Product):
    """A product whose rows are spread evenly over the experts."""

    @property
    def num_busy_experts(self) -> float:
        """Number of experts with rows: all, or one for each row."""
        return min(self.experts, self.rows)

    def tiles(self, block_m: int) -> float:
        """Number of tiles, equal for each busy expert."""
        return self.num_busy_experts * math.ceil(self.rows / self.num_busy_experts / block_m)


@cache
def facts_of(weights: str) -> Mapping[tuning.Key, Facts]:
    """Return facts about the compiled kernels for a format of weights.

    They are the same for all shapes whose sizes are multiples of 16. They are cached in FACTS,
    because compiling takes minutes.
    """
    file = FACTS / f"{weights}-triton-{triton.__version__}.pickle"
    if not file.exists():
        FACTS.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(_compiled(weights)))
    found: Mapping[tuning.Key, Facts] = pickle.loads(file.read_bytes())
    return found


def _compiled(weights: str) -> Mapping[tuning.Key, Facts]:
    make = partial(tuning.grouped_jobs, *read_shape(NEAREST[weights]), torch.bfloat16, kind=weights)
    return compile_ahead(make, next(make(device=torch.device("meta"))))


def jobs(shape: ExpertShapes, weights: str, balanced: bool) -> list[tuning.Job]:
    """Return the tuning jobs of a shape, with rows spread evenly over experts if `balanced`."""
    made = list(tuning.grouped_jobs(*shape, torch.bfloat16, torch.device("meta"), weights))
    if not balanced:
        return made
    names = Product.__dataclass_fields__
    return [
        replace(
            job,
            products={
                name: Balanced(**{field: getattr(p, field) for field in names})
                for name, p in job.products.items()
            },
        )
        for job in made
    ]


def beside_tables(source: str, device: str) -> dict[str, Any]:
    """Return predicted over measured time for every shape in the tables.

    The prediction is for the configuration that is predicted to be best.
    """
    card = CARDS[next(name for name in CARDS if device.upper() in name)]
    measured = read_tables(source, DEVICES[device]).experts
    found: dict[str, Any] = {}
    for weights, kind in MEASURED_AS.items():
        shapes: dict[str, Any] = {}
        predicted_all: list[float] = []
        measured_all: list[float] = []
        for key, times in sorted(measured.items()):
            name, dim, width, experts, top_k = key
            if name != kind or width % 128 or dim % 128 or experts < 8:
                continue
            predicted = {}
            for job in jobs(ExpertShapes(experts, width, dim, top_k), weights, balanced=True):
                tokens = job.size // top_k
                if tokens in TOKENS:
                    predict = tuning.predictor(job, facts_of(weights), card)
                    best = tuning.ranked(job, facts_of(weights), card)
                    predicted[tokens] = min(map(predict, [*best, job.default]))
            ratios = {tokens: predicted[tokens] / times.seconds(tokens) for tokens in predicted}
            shapes[f"E{experts} I{width} D{dim} K{top_k}"] = {
                "predicted_over_measured": {str(t): round(r, 3) for t, r in ratios.items()},
                "rank_correlation": round(
                    cost_attention.spearman(
                        [*predicted.values()], [times.seconds(t) for t in predicted]
                    ),
                    3,
                ),
            }
            predicted_all += predicted.values()
            measured_all += [times.seconds(t) for t in predicted]
        if not shapes:
            continue
        found[weights] = {
            "shapes": shapes,
            **cost_attention.agreement(list(zip(predicted_all, measured_all, strict=True))),
        }
    return found


def compile_peer(kernel_file: Path, config: tuple[int, ...]) -> Facts | None:
    """Return facts about vLLM's kernel for 16-bit weights, or None if it cannot be compiled.

    Runs in a process that called `cost.compile_only`.
    """
    block_m, block_n, block_k, warps, stages = config
    x = torch.empty((64, 2048), dtype=torch.bfloat16, device="meta")
    index = torch.empty(64, dtype=torch.int32)
    kernel = load_kernel(kernel_file)
    known: dict[str, Any] = dict(zip(("a_ptr", "b_ptr", "c_ptr"), (x, x, x), strict=True))
    known |= dict.fromkeys(
        ("sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr"), index
    )
    known |= dict.fromkeys(
        ("N", "K", "EM", "num_valid_tokens", "stride_am", "stride_be", "stride_bn", "stride_cm"),
        2048,
    )
    known |= dict.fromkeys(("stride_ak", "stride_bk", "stride_cn", "SPLIT_K"), 1)
    known |= {
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": block_n,
        "BLOCK_SIZE_K": block_k,
        "GROUP_SIZE_M": 1,
    }
    known |= {"top_k": 8, "compute_type": tl.bfloat16, "MUL_ROUTED_WEIGHT": False}
    known |= {
        name: None for name in kernel.arg_names if name.endswith("_ptr") and name not in known
    }
    values = {name: known.get(name, 0) for name in kernel.arg_names}
    for name in ("naive_block_assignment", "HAS_BIAS", "SWAP_AB", "USE_TD", "per_channel_quant"):
        values[name] = False
    values |= {name: False for name in kernel.arg_names if name.startswith("use_")}
    try:
        return next(
            cost.compiled_by(lambda: kernel[(1,)](**values, num_warps=warps, num_stages=stages), 1)
        )
    except tuning.CANNOT_RUN:
        return None


def order(folder: Path) -> dict[str, Any]:
    """Return where the model ranks each measured winner among all winners.

    Every table of vLLM that TUNED names is compared.
    """
    [kernel_file] = folder.rglob("fused_moe/fused_moe.py")
    won: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}
    for (shape, name), device in itertools.product(TUNED.items(), CARDS):
        for file in folder.rglob(f"{name},device_name={device.replace(' ', '_')}.json"):
            table = {
                int(tokens): c
                for tokens, c in json.loads(file.read_text()).items()
                if tokens.isdecimal()
            }
            won[device, shape] = {
                tokens: tuple(c[key] for key in PARAMETERS) for tokens, c in table.items()
            }
    every = sorted({c[:5] for table in won.values() for c in table.values()})
    context = get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=cost.compile_only) as pool:
        facts = dict(zip(every, pool.map(partial(compile_peer, kernel_file), every), strict=True))
    found: dict[str, Any] = {"candidates": len(every)}
    for (device, shape), table in won.items():
        experts, width, dim, top_k = read_shape(shape)
        places = {}
        losses = {}
        for tokens, (*best, group) in sorted(table.items()):
            times = {}
            for config, known in facts.items():
                block_m, block_n, depth, _, stages = config
                up = Product(
                    rows=tokens * top_k,
                    experts=experts,
                    width=2 * width,
                    inner=dim,
                    depth=depth,
                    matrices=1,
                    weight_bytes=2,
                    row_bytes=2,
                )
                both = up, replace(up, width=dim, inner=width)
                launch = {"block_m": block_m, "block_n": block_n, "stages": stages, "group": group}
                times[config] = (
                    sum(cost.seconds(known, p, CARDS[device], launch) for p in both)
                    if known
                    else math.inf
                )
            mine = times[tuple(best)]
            places[str(tokens)] = 1 + sum(took < mine for took in times.values())
            losses[str(tokens)] = round(100 * (mine / min(times.values()) - 1), 1)
        found[f"{device}, {shape}"] = {
            "place_of_the_winner": places,
            "predicted_slower_than_best_percent": losses,
        }
    everywhere = [
        place
        for table in found.values()
        if isinstance(table, dict)
        for place in table["place_of_the_winner"].values()
    ]
    found["winners"] = len(everywhere)
    found["among_the_ten_best_percent"] = round(100 * float(np.mean(np.array(everywhere) <= 10)), 1)
    found["median_place"] = float(np.median(everywhere))
    return found


def tables(write: bool) -> dict[str, Any]:
    """Return the predicted gains over the defaults for the shapes of `moeserve tune --all`.

    If `write`, store the best parameters of each shape that gains GAIN or more at any size. Sizes
    with less gain, or with fewer tokens than FROM, keep the defaults.
    """
    found: dict[str, Any] = {}
    for device, card in CARDS.items():
        for model, (shape, weights) in COMMON.items():
            entries = {}
            gains = {}
            for job in jobs(read_shape(shape), weights, balanced=False):
                predict = tuning.predictor(job, facts_of(weights), card)
                best = min([*tuning.ranked(job, facts_of(weights), card), job.default], key=predict)
                gain = predict(job.default) / predict(best)
                gains[str(job.size)] = round(gain, 3)
                keeps = gain < GAIN or job.size // read_shape(shape).top_k < FROM
                entries[job.size] = {} if keeps else best
            found.setdefault(device, {})[f"{model}, {weights}"] = gains
            if write and weights in CHECKED and any(entries.values()):
                configs.save(job.family, device, job.shape, entries, configs.FOLDER, "predicted")
    return found


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--tables", default=PACKAGE, metavar="FOLDER", help="systems/data of aiconfigurator-core"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the predicted tables of kernels/configs/"
    )
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="vLLM's unpacked wheel")
    args = parser.parse_args()
    results: dict[str, Any] = {"predicted_gain_over_defaults": tables(args.write)}
    attention: dict[str, Any] = {"predicted_gain_over_defaults": cost_attention.gains()}
    for device in ("h200", "h100"):
        try:
            results[device] = beside_tables(args.tables, device)
            attention[device] = cost_attention.beside_tables(args.tables, device)
        except ConfigError as error:
            results[device] = {"problem": str(error)}
    results["attention"] = attention
    if args.vllm is not None:
        results["order_of_what_won_on_cards"] = order(args.vllm)
    common.save("kernel-cost", args, results)


if __name__ == "__main__":
    main()
