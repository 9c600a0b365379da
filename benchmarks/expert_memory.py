"""Decoding with a part of the experts in memory, beside the same model with all of them; random weights in int4.

    python -m benchmarks.expert_memory
    python -m benchmarks.expert_memory --layers 4 --tokens 64    a trial

One request, on routers whose choices are skewed by a bias: for --zipf s a layer's expert of rank r is chosen with a
probability like r ** -s, if tokens' scores are normal and independent. `skew`: the share of all choices that went to
each layer's most chosen experts, as many as fit into the smaller memory, beside `zipf_skew`, what it should be. Each
case is a process of its own; the first start of the smaller memory writes the file (`first`), so that the figures are
those of a later one.

tokens_per_s: of the tokens behind the first --warm ones, which fill the cache. disk_gb_s: what O_DIRECT reads of
1 MiB, four at a time, get from the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from mmap import mmap
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from benchmarks import common
from moeserve import LLM, SamplingParams
from moeserve.loader import dummy
from moeserve.loader.load_plan import Piece
from moeserve.runner import load

GROUP = 128  # inputs that share a scale
CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "vocab_size": 32_000, "hidden_size": 2048,
    "intermediate_size": 768, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64,
    "num_experts_per_tok": 8, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "eos_token_id": 2,
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
}  # fmt: skip


class SkewedReader(dummy.RandomReader):
    """Random weights, tokens that differ, and routers that prefer some experts, others in each layer."""

    zipf = 1.0

    def jobs(self, piece: Piece, param: Any, limit: int | None = None) -> Iterator[Callable[[], int]]:
        if piece.source.endswith("e_score_correction_bias"):
            return iter([partial(self._skew, piece.source, param)])
        if piece.source.endswith("embed_tokens.weight"):  # else tokens are lost in what layers add
            return iter([partial(self._embed, param)])
        return super().jobs(piece, param, limit)

    @torch.inference_mode()
    def _skew(self, name: str, param: Any) -> int:
        order = list(range(len(param)))
        Random(name).shuffle(order)
        param.copy_(torch.from_numpy(biases(len(param), CONFIG["num_experts_per_tok"], self.zipf)[order]))
        return 0

    @torch.inference_mode()
    def _embed(self, param: Any) -> int:
        param.normal_(0, 4, generator=torch.Generator().manual_seed(0))
        return 0


def law(experts: int, top_k: int, zipf: float) -> NDArray[np.float64]:
    """The probability of being one of a token's experts, by rank: like Zipf's law, but none above 1."""
    weights, low, high = np.arange(1, experts + 1) ** -zipf, 0.0, float(experts) ** (zipf + 1)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * weights).sum() < top_k else (low, middle)
    return np.asarray(np.minimum(1, high * weights), np.float64)


@cache
def biases(experts: int, top_k: int, zipf: float) -> NDArray[np.float32]:
    """What added to sigmoids of normal scores makes choices follow the law, found by trial."""
    scores = 1 / (1 + np.exp(-np.random.default_rng(0).standard_normal((4000, experts))))
    wanted, found = law(experts, top_k, zipf), np.zeros(experts)
    for step in range(200):
        chosen = np.argpartition(-(scores + found), top_k, axis=1)[:, :top_k]
        share = np.bincount(chosen.ravel(), minlength=experts) / len(scores)
        found += 0.1 * 0.99**step * np.log((wanted + 1e-3) / (share + 1e-3))
    return np.asarray(found - found.max(), np.float32)


def expert_bytes(config: dict[str, Any]) -> int:
    """Of all experts, with a scale in fp32 for each group."""
    weights = 3 * config["hidden_size"] * config["intermediate_size"]
    return int(config["num_hidden_layers"] * config["num_local_experts"] * weights * (0.5 + 4 / GROUP))


def measure(model: Path, args: argparse.Namespace, memory: int | None) -> dict[str, Any]:
    """One case, in this process."""
    SkewedReader.zipf = args.zipf
    load.RandomReader = SkewedReader  # type: ignore[attr-defined]
    settings = {"load_format": "dummy", "quantization": "int4", "skip_tokenizer_init": True, "max_num_seqs": 4}
    settings |= {"max_model_len": 2048, "kv_cache_bytes": 1 << 28, "expert_memory": memory, "threads": args.threads}
    began = time.perf_counter()
    with LLM(model, **settings, packed_cache=str(model / "packed") if memory else "off") as llm:  # type: ignore[arg-type]
        started = time.perf_counter()
        prompt = [Random(7).randrange(32_000) for _ in range(32)]

        def run(tokens: int) -> tuple[list[int], float]:
            params = SamplingParams(temperature=1, seed=1, max_tokens=tokens, ignore_eos=True)
            start = time.perf_counter()
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            return list(output.outputs[0].token_ids), time.perf_counter() - start

        warm, _ = run(args.warm)
        prompt += warm
        one, one_s = run(1)
        counts = [*llm.stats.expert_cache]
        prompt += one
        tokens, many_s = run(args.tokens)
        found = {
            "tokens_per_s": (args.tokens - 1) / (many_s - one_s),
            "start_s": started - began,
            "peak_rss_bytes": common.peak_rss_bytes(psutil.Process()),
            "tokens": tokens,
        }
        if memory:
            hits, misses, stall_us, read = (b - a for a, b in zip(counts, llm.stats.expert_cache, strict=True))
            found |= {"hit_rate": hits / (hits + misses), "misses_per_token": misses / args.tokens}
            found |= {"stall_s": stall_us / 1e6, "read_bytes_per_token": read / args.tokens}
            found["skew"] = skew(llm, args.share)
    return found


def skew(llm: LLM, share: float) -> float:
    """The share of all choices that each layer's most chosen experts had, `share` of them."""
    front = llm._front
    shown = front.watch.view(front.state, front.ready).experts
    assert shown is not None
    counts_LE = np.frombuffer(shown.counts, "<i8").reshape(-1, shown.placement.num_experts)
    ranked_LE = np.sort(counts_LE, axis=1)[:, ::-1]
    return float(ranked_LE[:, : int(share * counts_LE.shape[1])].sum() / counts_LE.sum())


def disk_gb_s(file: Path) -> float:
    """Reads of 1 MiB past the system's cache, four at a time, in any order."""
    descriptor, size = os.open(file, os.O_RDONLY | os.O_DIRECT), 1 << 20
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


def case(model: Path, args: argparse.Namespace, memory: int | None) -> dict[str, Any]:
    """A case in a process of its own, which is killed with this one's terminal."""
    words = [sys.executable, "-m", "benchmarks.expert_memory", "--case", str(model), "--memory", str(memory or 0)]
    words += ["--zipf", str(args.zipf), "--tokens", str(args.tokens), "--warm", str(args.warm)]
    words += ["--threads", str(args.threads), "--share", str(args.share)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=common.ROOT, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    flags = common.parser(__doc__)
    flags.add_argument("--layers", type=int, default=24, help="[24, of 0.3 GiB each: 15 billion weights]")
    flags.add_argument("--experts", type=int, default=128, help="of a layer [128]")
    flags.add_argument("--share", type=float, default=0.5, help="of the experts' bytes in the smaller memory [0.5]")
    flags.add_argument("--zipf", type=float, default=1.0, help="[1.0]")
    flags.add_argument("--tokens", type=int, default=128, help="[128]")
    flags.add_argument("--warm", type=int, default=64, help="[64]")
    flags.add_argument("--rounds", type=int, default=3, help="[3]")
    flags.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="[all allowed CPUs]")
    flags.add_argument("--folder", type=Path, help="on the disk to measure [a temporary folder]")
    flags.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    flags.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args, args.memory or None)))
        return
    config = CONFIG | {"num_hidden_layers": args.layers, "num_local_experts": args.experts}
    total = expert_bytes(config)
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-", dir=args.folder) as name:
        model, memory = Path(name), int(args.share * total)
        (model / "config.json").write_text(json.dumps(config))
        first = case(model, args, memory)
        (file,) = (model / "packed").iterdir()
        rounds: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for _ in range(args.rounds):
            rounds.append((case(model, args, memory), case(model, args, None)))
        disk = disk_gb_s(file)
    for some, every in rounds:
        assert some.pop("tokens") == every.pop("tokens"), "an expert on disk changed a token"
    ratios = [some["tokens_per_s"] / every["tokens_per_s"] for some, every in rounds]
    first.pop("tokens")
    wanted = law(args.experts, CONFIG["num_experts_per_tok"], args.zipf)
    results = {
        "zipf_skew": float(wanted[: int(args.share * args.experts)].sum() / wanted.sum()), "expert_bytes": total,
        "expert_memory": memory, "zipf": args.zipf, "layers": args.layers,
        "experts": args.experts, "disk_gb_s": disk, "speed_of_all_in_memory": common.summary(ratios), "first": first,
        "some_in_memory": [some for some, _ in rounds], "all_in_memory": [every for _, every in rounds],
    }  # fmt: skip
    common.save("expert-memory", args, results)


if __name__ == "__main__":
    main()
