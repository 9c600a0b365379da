"""A change beside its base: two checkouts measured in turns on one machine, so that ratios hold.

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python -m benchmarks.turns ../before                 # this checkout is "after"
    python -m benchmarks.turns ../before --what model step

    model                           offline decode and prefill of a Qwen3-MoE with random weights;
                                    both engines stay loaded, and all tokens must be the same
    step, vote, streaming, kills    the scripts of those names, with the figures in SCRIPTS

Prints and saves samples and ratios: after / before of neighboring runs, the median over the rounds.
Above 1 is better for rates, below 1 for times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import ROOT, end_as_asked, parser, save
from benchmarks.peers import CASES, USUAL, prompts_of, speed_of, started

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
Figures = dict[str, float]
SCRIPTS: dict[str, tuple[list[str], Callable[[Any], Figures]]] = {
    "step": (
        ["--steps", "400"],
        lambda found: {f"{x['num_running']} us": x["step_us"]["p50"] for x in found["results"]},
    ),
    "vote": (
        ["--votes", "2000"],
        lambda found: {f"{x['num_engines']} us": x["vote_us"]["p50"] for x in found["results"]},
    ),
    "streaming": (["--repeat", "3"], lambda found: {"events/s": found["events_per_s"]["median"]}),
    "kills": (
        ["--kills", "6", "--rest-s", "1"],
        lambda found: {f"{k} s": found["median_s"][k] for k in ("noticed", "moving")},
    ),
}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("before", type=Path, help="a built checkout of the state to compare with")
    flags.add_argument(
        "--what", nargs="+", choices=["model", *SCRIPTS], default=["model", *SCRIPTS]
    )
    flags.add_argument("--rounds", type=int, default=5)
    args = flags.parse_args()
    if not (args.before / "moeserve").is_dir():
        flags.error(f"{args.before} is no checkout of moeserve: it has no folder moeserve/")
    end_as_asked()
    checkouts = {"before": args.before.resolve(), "after": ROOT}
    compared = {
        what: compare_models if what == "model" else partial(compare_scripts, what)
        for what in args.what
    }
    save(
        "turns",
        args,
        {what: compare(checkouts, args.rounds) for what, compare in compared.items()},
    )


def compare_scripts(what: str, checkouts: Mapping[str, Path], rounds: int) -> dict[str, Any]:
    """Run each checkout's own script; return both samples and the median ratios."""
    flags, figures = SCRIPTS[what]
    command = [sys.executable, "-m", f"benchmarks.{what}", "--no-save", *flags]

    def measure(name: str, number: int) -> Figures:
        cwd = checkouts[name]
        env = os.environ | {"PYTHONPATH": str(cwd)}
        done = subprocess.run(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=True
        )
        return figures(json.loads(done.stdout))

    return in_turns(measure, rounds)


def compare_models(checkouts: Mapping[str, Path], rounds: int) -> dict[str, Any]:
    """Load one model in both checkouts and send both the same requests in turns."""
    threads = len(os.sched_getaffinity(0))
    tokens: dict[str, list[Any]] = {name: [] for name in checkouts}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moeserve-turns-")))
        (folder / "config.json").write_text(json.dumps(MODEL))
        engines = {}
        for name, checkout in checkouts.items():
            log = folder / f"{name}.log"
            path = str(checkout)
            start = started("moeserve-dummy", sys.executable, folder, threads, log, PYTHONPATH=path)
            engines[name], _ = stack.enter_context(start)

        def measure(name: str, number: int) -> Figures:
            rates = {}
            for case in map(CASES.__getitem__, USUAL):
                prompts = prompts_of(case, MODEL["vocab_size"], number)
                rates[f"{case.name} tokens/s"], answers = speed_of(engines[name], case, prompts)
                tokens[name].append(answers)
            return rates

        compared = in_turns(measure, rounds, warm_up=True)
    return compared | {"same_tokens": tokens["before"] == tokens["after"]}


def in_turns(
    measure: Callable[[str, int], Figures], rounds: int, warm_up: bool = False
) -> dict[str, Any]:
    """Measure both checkouts `rounds` times; each comes first in every second round.

    `measure` gets the checkout's name and the number of the round. The warm-up has a negative
    number, and its figures are discarded.
    """
    samples: dict[str, list[Figures]] = {"before": [], "after": []}
    for number in range(-warm_up, rounds):
        for name in sorted(samples, reverse=number % 2 == 0):
            found = measure(name, number)
            print(
                name,
                {case: round(figure, 3) for case, figure in found.items()},
                file=sys.stderr,
                flush=True,
            )
            if number >= 0:
                samples[name].append(found)
    pairs = list(zip(samples["before"], samples["after"], strict=True))
    ratios = {
        case: round(median(after[case] / before[case] for before, after in pairs), 3)
        for case in pairs[0][0]
    }
    return {"after_over_before": ratios, "samples": samples}


if __name__ == "__main__":
    main()
