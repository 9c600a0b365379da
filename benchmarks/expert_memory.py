"""Decoding with part of the experts in memory, beside all in memory and beside llama.cpp.

    python -m benchmarks.expert_memory --llamacpp PYTHON
    python -m benchmarks.expert_memory --layers 4 --tokens 64    # a trial

One request decodes on a file of benchmarks.skewed_gguf. Each case is a process of its own. The
first start with less memory writes packed weights; its figures are kept apart (`first`), and the
compared ones are those of later starts. llama.cpp, which maps its file, decodes the tokens that
moeserve sampled.

As root, the case with less memory and llama.cpp run in a cgroup of `limit_bytes`. The limit
includes the page cache, which holds nothing of their files when they start.

Prints and saves, among others:

    tokens_per_s   without the first --warm tokens, which fill caches
    skew           share of all routing choices that went to the most chosen experts of each layer,
                   counting as many experts as fit into the smaller memory
    zipf_skew      the skew that the file was made for
    disk_gb_s      O_DIRECT reads of 1 MiB, four at a time, from the packed file
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil

from benchmarks import common, skewed_gguf
from moeserve import LLM, SamplingParams

BESIDE_EXPERTS = 9 * 2**28  # bytes of the limit for everything but experts
CGROUPS = (
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),  # cgroup v1
    ("/sys/fs/cgroup", "memory.max"),  # v2
)


def measure(model: Path, args: argparse.Namespace, memory: int | None) -> dict[str, Any]:
    """Run one case in this process."""
    began = time.perf_counter()
    with LLM(
        model,
        max_num_seqs=4,
        max_model_len=2048,
        kv_cache_bytes=2**28,
        threads=args.threads,
        expert_memory=memory,
        packed_cache=str(model.parent / "packed") if memory else "off",
    ) as llm:
        started = time.perf_counter()
        prompt = [Random(7).randrange(1000) for _ in range(32)]

        def run(tokens: int) -> tuple[list[int], float]:
            params = SamplingParams(temperature=1, seed=1, max_tokens=tokens, ignore_eos=True)
            start = time.perf_counter()
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            return list(output.outputs[0].token_ids), time.perf_counter() - start

        prompt += run(args.warm)[0]
        one, one_s = run(1)
        counts = [*llm.stats.expert_cache]
        prompt += one
        tokens, many_s = run(args.tokens)
        found = {
            "tokens_per_s": (args.tokens - 1) / (many_s - one_s),
            "start_s": started - began,
            "peak_rss_bytes": common.peak_rss_bytes(psutil.Process()),
            "tokens": [*prompt, *tokens],
        }
        if memory:
            hits, misses, stall_us, read = (
                b - a for a, b in zip(counts, llm.stats.expert_cache, strict=True)
            )
            found |= {"hit_rate": hits / (hits + misses), "misses_per_token": misses / args.tokens}
            found |= {"stall_s": stall_us / 1e6, "read_bytes_per_token": read / args.tokens}
            found["skew"] = skew(llm, args.share)
    return found


def skew(llm: LLM, share: float) -> float:
    """Return the share of all choices that went to each layer's `share` most chosen experts."""
    front = llm._front
    shown = front.monitor.view(front.state, front.ready).experts
    assert shown is not None
    counts_LE = np.frombuffer(shown.counts, "<i8").reshape(-1, shown.placement.num_experts)
    ranked_LE = np.sort(counts_LE, axis=1)[:, ::-1]
    return float(ranked_LE[:, : int(share * counts_LE.shape[1])].sum() / counts_LE.sum())


def disk_gb_s(file: Path) -> float:
    """Return GB/s of random 1 MiB reads past the page cache, four at a time."""
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    size = 1 << 20
    places = list(range(0, file.stat().st_size - size, size))
    Random(3).shuffle(places)
    places = places[:512]
    buffers = [mmap(-1, size) for _ in range(4)]

    def live(worker: int) -> None:
        for place in places[worker::4]:
            os.preadv(descriptor, [buffers[worker]], place)

    start = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(live, range(4)))
    os.close(descriptor)
    return len(places) * size / (time.perf_counter() - start) / 1e9


@contextmanager
def cgroup(limit: int | None) -> Iterator[Path | None]:
    """Yield the cgroup.procs file of a group with `limit` bytes of memory; None without a limit.

    A process that writes its id to the file joins the group.
    """
    if limit is None:
        yield None
        return
    root, file = next(
        (Path(root), file) for root, file in CGROUPS if Path(root, "cgroup.procs").exists()
    )
    group = root / f"moeserve-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / file).write_text(str(limit))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def run(
    words: Sequence[str], files: Sequence[Path], limit: int | None, case: Any = None
) -> dict[str, Any]:
    """Run a case's process and return the last line that it prints, decoded from JSON.

    `files` are dropped from the page cache first.
    """
    os.sync()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with cgroup(limit) as procs:
        done = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            text=True,
            cwd=common.ROOT,
            check=True,
            input=json.dumps(case),
            preexec_fn=lambda: procs and procs.write_text(str(os.getpid())),
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cases(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run all cases in turns."""
    model = folder / "model.gguf"
    total = skewed_gguf.expert_bytes(args.layers, args.experts)
    skewed_gguf.write(model, args.layers, args.experts, args.zipf)
    memory = int(args.share * total)
    limit = memory + BESIDE_EXPERTS if os.geteuid() == 0 else None
    options = [f"--{name}={getattr(args, name)}" for name in ("tokens", "warm", "threads", "share")]

    def ours(memory: int, limit: int | None) -> dict[str, Any]:
        words = [
            sys.executable,
            "-m",
            "benchmarks.expert_memory",
            f"--case={model}",
            f"--memory={memory}",
            *options,
        ]
        return run(words, [model, *folder.glob("packed/*")] if limit else [], limit)

    def theirs(tokens: list[int]) -> dict[str, Any]:
        words = [args.llamacpp, "benchmarks/llama_cpp_logits.py", "decode", str(model)]
        case = {"tokens": tokens, "timed": args.tokens - 1, "threads": args.threads}
        seconds = run(words, [model], limit, case)["seconds"]
        return {"tokens_per_s": len(seconds) / sum(seconds), "slowest_s": max(seconds)}

    rounds: list[dict[str, dict[str, Any]]] = []
    first = ours(memory, limit)
    tokens = first.pop("tokens")
    for _ in range(args.rounds):
        rounds.append({"some_in_memory": ours(memory, limit), "all_in_memory": ours(0, None)})
        for found in rounds[-1].values():
            assert found.pop("tokens") == tokens, "an expert on disk changed a token"
        if args.llamacpp:
            rounds[-1]["llama.cpp"] = theirs(tokens)
    wanted = skewed_gguf.law(args.experts, args.zipf)
    results = {
        "zipf_skew": float(wanted[: int(args.share * args.experts)].sum() / wanted.sum()),
        "expert_bytes": total,
        "expert_memory": memory,
        "limit_bytes": limit,
        "zipf": args.zipf,
        "layers": args.layers,
        "experts": args.experts,
        "disk_gb_s": disk_gb_s(next(folder.glob("packed/*"))),
        "first": first,
    }
    for name in list(rounds[0])[1:]:
        ratios = [
            one["some_in_memory"]["tokens_per_s"] / one[name]["tokens_per_s"] for one in rounds
        ]
        results[f"over_{name}"] = common.summary(ratios)
    return results | {name: [one[name] for one in rounds] for name in rounds[0]}


def main() -> None:
    flags = common.parser(__doc__)
    flags.add_argument(
        "--layers", type=int, default=24, help="[24, each 0.3 GiB: 15 billion weights]"
    )
    flags.add_argument("--experts", type=int, default=128, help="experts per layer [128]")
    flags.add_argument(
        "--share",
        type=float,
        default=0.5,
        help="share of experts in the smaller memory [0.5]",
    )
    flags.add_argument("--zipf", type=float, default=1.0, help="Zipf exponent of the routing [1.0]")
    flags.add_argument("--tokens", type=int, default=128, help="measured tokens [128]")
    flags.add_argument("--warm", type=int, default=64, help="tokens before them [64]")
    flags.add_argument("--rounds", type=int, default=3, help="[3]")
    flags.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="[all allowed CPUs]"
    )
    flags.add_argument("--folder", type=Path, help="where to write files [a temporary folder]")
    flags.add_argument(
        "--llamacpp",
        metavar="PYTHON",
        help="also measure llama.cpp, by an interpreter with llama-cpp-python",
    )
    flags.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    flags.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args, args.memory or None)))
        return
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-", dir=args.folder) as name:
        common.save("expert-memory", args, cases(Path(name), args))


if __name__ == "__main__":
    main()
