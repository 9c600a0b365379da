"""A change beside what it changed: two checkouts measured in turns on one machine, so that their ratios hold.

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python -m benchmarks.turns ../before                 # this checkout is "after"
    python -m benchmarks.turns ../before --what model step

model: offline decode and prefill of a Qwen3-MoE with random weights, both engines loaded at once; all tokens must be
the same. step, vote, streaming, kills: the scripts of those names, with the figures below. Ratios are after / before
of neighbouring runs, the median over the rounds: above 1 is better for rates, below 1 for times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import ROOT, parser, save

MODEL = {
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
CASES = {  # requests, prompt tokens, output tokens
    "decode, batch 1": (1, 32, 48),
    "decode, batch 8": (8, 32, 48),
    "decode, batch 32": (32, 32, 32),
    "prefill, 1 x 1,024": (1, 1024, 1),
    "prefill, 8 x 512": (8, 512, 1),
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
    args = parser(__doc__)
    args.add_argument("before", nargs="?", type=Path, help="a built checkout of the state to compare with")
    args.add_argument("--what", nargs="+", choices=["model", *SCRIPTS], default=["model", *SCRIPTS])
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--engine", help=SUPPRESS)
    asked = args.parse_args()
    if asked.engine:
        serve_cases(asked.engine)
        return
    if asked.before is None or not (asked.before / "moeserve").is_dir():
        args.error(f"BEFORE is a checkout of moeserve, not {asked.before}")
    save("turns", asked, {what: compare(what, asked) for what in asked.what})


def compare(what: str, asked: Namespace) -> dict[str, Any]:
    """Returns, by case, the samples of both checkouts and the median ratio."""
    checkouts = {"before": asked.before.resolve(), "after": ROOT}
    if what == "model":
        return compare_models(checkouts, asked.rounds)
    flags, figures = SCRIPTS[what]

    def measure(name: str) -> Figures:
        command = [sys.executable, "-m", f"benchmarks.{what}", "--no-save", *flags]
        cwd = checkouts[name]
        done = subprocess.run(command, cwd=cwd, env=environ(cwd), stdout=subprocess.PIPE, text=True, check=True)
        return figures(json.loads(done.stdout))

    return in_turns(measure, asked.rounds)


def compare_models(checkouts: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Loads one model in both checkouts and gives both the same requests in turns."""
    with tempfile.TemporaryDirectory(prefix="moeserve-turns-") as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        engines = {name: Engine(checkout, model) for name, checkout in checkouts.items()}
        tokens: dict[str, dict[str, Any]] = {name: {} for name in engines}

        def measure(name: str) -> Figures:
            rates = {}
            for case, (requests, prompt, output) in CASES.items():
                spent_s, tokens[name][case] = engines[name].ask(case)
                rates[f"{case}, tokens/s"] = requests * (output if output > 1 else prompt) / spent_s
            return rates

        try:
            return {**in_turns(measure, rounds, warm_up=True), "same_tokens": tokens["before"] == tokens["after"]}
        finally:
            for engine in engines.values():
                engine.process.kill()


def in_turns(measure: Callable[[str], Figures], rounds: int, warm_up: bool = False) -> dict[str, Any]:
    """Measures before and after `rounds` times, each of them first in every second round."""
    samples: dict[str, list[Figures]] = {"before": [], "after": []}
    for number in range(-warm_up, rounds):
        for name in sorted(samples, reverse=number % 2 == 0):
            found = measure(name)
            print(name, {case: round(figure, 3) for case, figure in found.items()}, file=sys.stderr, flush=True)
            if number >= 0:
                samples[name].append(found)
    pairs = list(zip(samples["before"], samples["after"], strict=True))
    ratios = {case: round(median(after[case] / before[case] for before, after in pairs), 3) for case in pairs[0][0]}
    return {"after_over_before": ratios, "samples": samples}


class Engine:
    """A process that holds a checkout's engine and answers one case per line."""

    def __init__(self, checkout: Path, model: str) -> None:
        command = [sys.executable, __file__, "--engine", model]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=checkout, env=environ(checkout), stdin=pipe, stdout=pipe, text=True
        )
        self._read()

    def ask(self, case: str) -> tuple[float, Any]:
        """Returns the seconds that the case took, and the token ids of every request."""
        assert self.process.stdin is not None
        print(case, file=self.process.stdin, flush=True)
        spent_s, tokens = self._read()
        return spent_s, tokens

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with exit code {self.process.wait()}; its messages are above")
        return json.loads(line)


def serve_cases(model: str) -> None:
    """Runs in the process of an Engine: reads a case's name per line, writes [seconds, token ids]."""
    from moeserve import LLM, SamplingParams

    sizes: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 64, "kv_cache_bytes": 2**30}
    llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, **sizes)
    print("{}", flush=True)
    for line in sys.stdin:
        requests, prompt, output = CASES[line.strip()]
        prompts = [[(i * 7919 + j * 104729 + 11) % 31990 + 3 for j in range(prompt)] for i in range(requests)]
        began = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        spent_s = time.perf_counter() - began
        print(json.dumps([spent_s, [list(answer.outputs[0].token_ids) for answer in answers]]), flush=True)


def environ(checkout: Path) -> dict[str, str]:
    """The environment in which Python imports moeserve and benchmarks from a checkout."""
    return {**os.environ, "PYTHONPATH": str(checkout)}


if __name__ == "__main__":
    main()
