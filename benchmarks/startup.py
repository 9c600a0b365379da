"""Startup: HTTP listening, ready, first token, peak memory of the engine, and `--version`.

    python -m benchmarks.startup                      # the demo model
    python -m benchmarks.startup --model DIR          # a directory, or a GGUF file
    python -m benchmarks.startup --packed-cache DIR   # also with packed weights in that folder
    python -m benchmarks.startup --model 15b-q4-0.gguf --make 15b --packed-cache DIR --new

Targets: listening within 0.5 s, demo ready within 3 s, --version within 0.15 s, peak memory at most
1.15 x weights + 0.6 GB.

With --packed-cache, starts with and without packed weights take turns. With --new, starts that find
no packed weights and starts that find those of the one before take turns. Targets for their first
tokens are 20 s and 3 s (15b), 4 s and 1.5 s (1b).

Files are read before each start, so that they are in the page cache. Prints and saves medians,
ranges and samples.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.common import (
    parser,
    peak_rss_bytes,
    running_server,
    save,
    summary,
    weight_bytes,
    weight_files,
)

# Layers and experts of the models that --make writes, of the shape in benchmarks.skewed_gguf
SHAPES = {"1b": (8, 24), "15b": (48, 64)}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="demo", help="model directory or GGUF file [demo]")
    flags.add_argument("--repeat", type=int, default=5, help="number of starts [5]")
    flags.add_argument("--max-model-len", help="as of `moeserve serve`")
    flags.add_argument(
        "--packed-cache", help="folder for packed weights: also measure starts that map them"
    )
    flags.add_argument(
        "--new",
        action="store_true",
        help="compare with starts that write packed weights; deletes those in --packed-cache",
    )
    flags.add_argument(
        "--make",
        choices=SHAPES,
        help="write --model first, random weights in Q4_0, if it is missing",
    )
    flags.add_argument(
        "--settings", default="{}", help="JSON of settings under `model:`, such as load_format"
    )
    args = flags.parse_args()
    if args.new and not args.packed_cache:
        flags.error("--new needs --packed-cache")
    if args.make:
        make(Path(args.model), args.make)
    configs = configs_of(args)
    if args.packed_cache and not args.new:
        one_start(args, configs["packed_cache_"], writes=True)
    rounds = [
        [one_start(args, config, writes=how == "new_") for how, config in configs.items()]
        for _ in range(args.repeat)
    ]
    weights = weight_bytes(args.model)  # 0 with `load_format: dummy`
    peak = max(run["engine_peak_bytes"] for run, *_ in rounds)
    name = Path(args.model).name.removesuffix(".gguf")
    result = {
        "model": name,
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
    save(f"startup-{name}", args, result)


def make(path: Path, shape: str) -> None:
    """Write a GGUF file unless it exists."""
    from benchmarks import skewed_gguf  # needs the package gguf

    if not path.exists():
        layers, experts = SHAPES[shape]
        skewed_gguf.write(path, layers, experts, zipf=0.5, alike=True)


def configs_of(args: Namespace) -> dict[str, str]:
    """Return the config of each kind of start that is compared, by the prefix of its results."""

    def config(packed_cache: str) -> str:
        settings = {"packed_cache": packed_cache, **json.loads(args.settings)}
        return json.dumps({"model": settings})

    if args.new:
        return dict.fromkeys(("new_", "packed_cache_"), config(args.packed_cache))
    configs = {"": config("off")}
    if args.packed_cache:
        configs["packed_cache_"] = config(args.packed_cache)
    return configs


def one_start(args: Namespace, config: str, *, writes: bool) -> dict[str, Any]:
    """Start a server; return seconds since its start, and the engine's peak memory.

    Peak resident memory is taken when the server is ready, and after an answer.

    writes: delete all packed weights before, and wait until the server has written its own.
    """
    packed = Path(args.packed_cache) if args.packed_cache else None
    for file in packed.glob("*.packed") if packed and writes else ():
        file.unlink()
    read_files(args.model, packed)
    limit = ["--max-model-len", args.max_model_len] if args.max_model_len else []
    with running_server(args.model, *limit, config=config) as server:
        listening_s = server.wait("/livez")
        ready_s = server.wait("/readyz")
        peak = peak_rss_bytes(server.tree()["engine"])
        server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1, "ignore_eos": True})
        first_token_s = time.perf_counter() - server.started_s
        while packed and writes and not list(packed.glob("*.packed")):
            assert server.process.is_running(), server.log.read_text()
            time.sleep(0.5)
        return {
            "listening_s": listening_s,
            "ready_s": ready_s,
            "first_token_s": first_token_s,
            "engine_peak_bytes": peak,
            "engine_peak_after_answer_bytes": peak_rss_bytes(server.tree()["engine"]),
        }


def read_files(model: str, packed: Path | None) -> None:
    """Read the files that a start reads, the packed weights last."""
    files = [*weight_files(model), *(packed.glob("*.packed") if packed else ())]
    buffer = bytearray(8 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


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
