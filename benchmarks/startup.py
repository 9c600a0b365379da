"""Startup: HTTP listening, ready, first token, peak memory of the engine, and `--version`.

    python -m benchmarks.startup                      # the demo model
    python -m benchmarks.startup --model DIR          # run twice: files are warm the second time
    python -m benchmarks.startup --packed-cache DIR   # also with packed weights in that folder

Targets: listening within 0.5 s, demo ready within 3 s, --version within 0.15 s, peak memory at most
1.15 x weights + 0.6 GB. With --packed-cache, starts with and without packed weights take turns.
Prints and saves medians, ranges and samples.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import parser, peak_rss_bytes, running_server, save, summary, weight_bytes


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="demo", help="model directory [demo]")
    flags.add_argument("--repeat", type=int, default=5, help="number of starts [5]")
    flags.add_argument("--max-model-len", help="as of `moeserve serve`")
    flags.add_argument(
        "--packed-cache", help="folder for packed weights: also measure starts that map them"
    )
    flags.add_argument(
        "--settings", default="{}", help="JSON of settings under `model:`, such as load_format"
    )
    args = flags.parse_args()
    limit = ["--max-model-len", args.max_model_len] if args.max_model_len else []
    settings = json.loads(args.settings)
    configs = {"": json.dumps({"model": {"packed_cache": "off", **settings}})}
    if args.packed_cache:
        configs["packed_cache_"] = json.dumps(
            {"model": {"packed_cache": args.packed_cache, **settings}}
        )
        one_start(args.model, limit, configs["packed_cache_"], Path(args.packed_cache))
    rounds = [
        [one_start(args.model, limit, config) for config in configs.values()]
        for _ in range(args.repeat)
    ]
    weights = weight_bytes(args.model)  # 0 with `load_format: dummy`
    peak = max(run["engine_peak_bytes"] for run, *_ in rounds)
    result = {
        "model": Path(args.model).name,
        "weight_bytes": weights,
        "version_s": summary([version_s() for _ in range(2 * args.repeat)]),
        **{
            how + name: summary([runs[i][name] for runs in rounds])
            for i, how in enumerate(configs)
            for name in rounds[0][i]
        },
        "engine_peak_limit_bytes": int(1.15 * weights + 0.6e9),
        "engine_peak_within_limit": peak <= 1.15 * weights + 0.6e9,
    }
    save(f"startup-{Path(args.model).name}", args, result)


def one_start(
    model: str, limit: list[str], config: str, kept: Path | None = None
) -> dict[str, Any]:
    """Start a server; return seconds since its start, and the engine's peak memory.

    Peak resident memory is taken when the server is ready, and after an answer. If `kept` is given,
    the server runs until that folder has packed weights.
    """
    with running_server(model, *limit, config=config) as server:
        listening_s = server.wait("/livez")
        ready_s = server.wait("/readyz")
        peak = peak_rss_bytes(server.tree()["engine"])
        server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1, "ignore_eos": True})
        first_token_s = time.perf_counter() - server.started_s
        while kept and not list(kept.glob("*.packed")):
            assert server.process.is_running(), server.log.read_text()
            time.sleep(0.5)
        return {
            "listening_s": listening_s,
            "ready_s": ready_s,
            "first_token_s": first_token_s,
            "engine_peak_bytes": peak,
            "engine_peak_after_answer_bytes": peak_rss_bytes(server.tree()["engine"]),
        }


def version_s() -> float:
    """Return the wall time of the installed `moeserve --version`, interpreter included."""
    begun_s = time.perf_counter()
    subprocess.run(
        [Path(sys.executable).with_name("moeserve"), "--version"],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    main()
