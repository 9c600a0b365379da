"""What the model of kernels/cost.py predicts for experts' products, beside measured times of vLLM's Triton kernels; and
the predicted tables of `kernels/configs/`.

    python -m benchmarks.cost --tables FOLDER             # systems/data of aiconfigurator-core; without: the package
    python -m benchmarks.cost --write                     # writes the predicted tables, too

Needs no GPU: Triton compiles for Hopper. The measured rows are spread evenly over all experts, so the predicted ones
are, too. vLLM's kernels are not ours, and are followed by an activation and a sum of their own: levels compare roughly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from benchmarks import common
from moeserve.cli.tune import COMMON, ExpertShapes, compile_ahead, read_shape
from moeserve.errors import ConfigError
from moeserve.kernels import configs, tuning
from moeserve.kernels.cost import CARDS, Facts, Product
from moeserve.plan.hardware import DEVICES
from moeserve.plan.tables import PACKAGE, read_tables

MEASURED_AS = {"plain": "bfloat16", "fp8": "fp8_block", "fp4": "w4a16_mxfp4"}
NEAREST = {"plain": "E128 I768 D2048 K8", "fp8": "E256 I2048 D7168 K8", "fp4": "E128 I2880 D2880 K4"}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384)
GAIN = 1.05  # predicted, from which on an entry of a table differs from the defaults


class Balanced(Product):
    """A product whose rows are spread evenly over the experts."""

    @property
    def busy(self) -> float:
        """All experts, or one for each row."""
        return min(self.experts, self.rows)

    def tiles(self, block_m: int) -> float:
        """As many for each busy expert."""
        return self.busy * math.ceil(self.rows / self.busy / block_m)


@cache
def facts_of(weights: str) -> Mapping[tuning.Key, Facts]:
    """Facts about the kernels of such weights, which are the same for all shapes whose sizes are multiples of 16."""
    return compile_ahead(partial(tuning.grouped_jobs, *read_shape(NEAREST[weights]), torch.bfloat16, kind=weights))


def jobs(shape: ExpertShapes, weights: str, balanced: bool) -> list[tuning.Job]:
    """The entries of a shape; their products spread evenly if `balanced`."""
    made = list(tuning.grouped_jobs(*shape, torch.bfloat16, torch.device("meta"), weights))
    if not balanced:
        return made
    names = Product.__dataclass_fields__
    return [
        replace(
            job,
            products={
                name: Balanced(**{field: getattr(p, field) for field in names}) for name, p in job.products.items()
            },
        )
        for job in made
    ]


def ranks(values: Sequence[float]) -> Any:
    return np.argsort(np.argsort(values))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation."""
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def beside_tables(source: str, device: str) -> dict[str, Any]:
    """Predicted over measured, for every shape of the tables, with the configuration that is predicted to be best."""
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
                "rank_correlation": round(spearman([*predicted.values()], [times.seconds(t) for t in predicted]), 3),
            }
            predicted_all += predicted.values()
            measured_all += [times.seconds(t) for t in predicted]
        if not shapes:
            continue
        errors = np.abs(np.log(np.array(predicted_all) / np.array(measured_all)))
        found[weights] = {
            "shapes": shapes,
            "entries": len(predicted_all),
            "rank_correlation_of_all": round(spearman(predicted_all, measured_all), 3),
            "median_error_percent": round(100 * float(np.expm1(np.median(errors))), 1),
            "p90_error_percent": round(100 * float(np.expm1(np.quantile(errors, 0.9))), 1),
        }
    return found


def tables(write: bool) -> dict[str, Any]:
    """Predicted gains over the defaults, for the shapes of `moeserve tune --all`. Written are, of each shape with a
    gain of GAIN at any size, the parameters that differ from the defaults; other sizes keep the defaults."""
    found: dict[str, Any] = {}
    for device, card in CARDS.items():
        for model, (shape, weights) in COMMON.items():
            entries, gains = {}, {}
            for job in jobs(read_shape(shape), weights, balanced=False):
                predict = tuning.predictor(job, facts_of(weights), card)
                best = min([*tuning.ranked(job, facts_of(weights), card), job.default], key=predict)
                gain = predict(job.default) / predict(best)
                gains[str(job.size)] = round(gain, 3)
                keeps = gain < GAIN
                entries[job.size] = {} if keeps else {n: v for n, v in best.items() if v != job.default[n]}
            found.setdefault(device, {})[f"{model}, {weights}"] = gains
            if write and any(entries.values()):
                configs.keep(job.family, device, job.shape, entries, configs.FOLDER, "predicted")
    return found


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tables", default=PACKAGE, metavar="FOLDER", help="systems/data of aiconfigurator-core")
    parser.add_argument("--write", action="store_true", help="write the predicted tables of kernels/configs/")
    args = parser.parse_args()
    results: dict[str, Any] = {"predicted_gain_over_defaults": tables(args.write)}
    for device in ("h200", "h100"):
        try:
            results[device] = beside_tables(args.tables, device)
        except ConfigError as error:
            results[device] = {"problem": str(error)}
    common.save("kernel-cost", args, results)


if __name__ == "__main__":
    main()
