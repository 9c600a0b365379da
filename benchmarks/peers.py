"""Tokens per second beside other engines: same checkpoint, prompts and cores, in turns.

    python -m benchmarks.peers MODEL --engine moeserve --engine vllm=PYTHON \\
        --engine llamacpp=PYTHON --engine ik_llama=DIR --gguf FILE
    python -m benchmarks.peers MODEL --engine moeserve --engine moeserve-int8 \\
        --case decode-1 --what quantized

PYTHON is the interpreter of an environment that has the engine (peers.md says how to make one); the
default is this one. DIR has ik_llama.cpp's sources and build/. Each engine loads once and is
stopped by SIGSTOP while another one runs. Nothing else may run: engines with spinning threads
collapse beside other work.

Every case and round begins with the machine's read and FLOP rates, which give the floor. A decode
rate counts the tokens after the first, because the time of the same prompts with one token is
subtracted.

Samples are appended to a file as they come, and the same command resumes where the last one ended
(--minutes ends it early). At the end a table is printed, and all samples are saved.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import RESULTS, ROOT, end_as_asked, parser, save
from benchmarks.peers_engine import ENGINES, OF_SOURCES
from benchmarks.peers_floor import Case, Rates, compiled_machine, floor_tokens_per_s
from moeserve.models.hf_config import read_model_spec

CASES = {
    case.name: case
    for case in (
        Case("decode-1", batch=1, prompt_tokens=32, new_tokens=65),
        Case("decode-8", batch=8, prompt_tokens=32, new_tokens=65),
        Case("decode-32", batch=32, prompt_tokens=32, new_tokens=33),
        Case("prefill-1x1024", batch=1, prompt_tokens=1024, new_tokens=1),
        Case("prefill-8x512", batch=8, prompt_tokens=512, new_tokens=1),
        Case("decode-64", batch=64, prompt_tokens=32, new_tokens=33),
        Case("decode-128", batch=128, prompt_tokens=32, new_tokens=33),
    )
}
USUAL = list(CASES)[:5]
OF_GGUF = ("llamacpp", "moeserve-gguf", *OF_SOURCES)
START = "start"  # case: seconds from a process's start to its first answer
# Touches every weight: maps files and grows buffers.
WARM_UP = Case("warm-up", batch=4, prompt_tokens=512, new_tokens=8)
BUSY_S = 0.3  # how long to watch for other programs before a case
BUSY_PERCENT = 10.0  # of the CPUs: warn above this
Sample = dict[str, Any]


@dataclass(slots=True)
class Engine:
    """A running engine, stopped except while it answers."""

    name: str
    process: subprocess.Popen[str]
    version: str = ""

    def ask(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Return the seconds and the tokens of each prompt."""
        self.signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self.hear()
        self.signal(signal.SIGSTOP)
        return answer["seconds"], answer["tokens"]

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}: its errors are above")
        return json.loads(line)

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


def environment_of(name: str, python: str, threads: int) -> dict[str, str]:
    """Return the environment in which an engine is fastest on so many CPUs."""
    if name != "vllm":
        return os.environ | {"OMP_NUM_THREADS": str(threads)}
    preload = [
        *Path("/usr/lib").rglob("libtcmalloc_minimal.so.4"),
        *Path(python).parents[1].rglob("libiomp5.so"),
    ]
    own = {
        "LD_PRELOAD": ":".join(map(str, preload)),  # as vLLM's documentation advises for CPUs
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",  # by default it reserves a core
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "HF_HUB_OFFLINE": "1",
    }
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("OMP_NUM_THREADS", "PYTHONPATH")
    } | own


@contextmanager
def started(
    name: str, place: str, model: Path, threads: int, log: Path, **env: str
) -> Iterator[tuple[Engine, float]]:
    """Yield an engine after its first answer, and the seconds from its start to that answer.

    place: the engine's interpreter, or the folder of its sources for engines in OF_SOURCES.
    """
    python = sys.executable if name in OF_SOURCES else place
    command = [
        python,
        str(ROOT / "benchmarks/peers_engine.py"),
        name,
        str(model),
        "--threads",
        str(threads),
        *(["--sources", place] if name in OF_SOURCES else []),
    ]
    begun_s = time.perf_counter()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            env=environment_of(name, python, threads) | env,
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    engine = Engine(name, process)
    try:
        try:
            engine.version = engine.hear()["version"]
        except SystemExit:
            raise SystemExit(f"{name} did not start:\n{log.read_text()[-3000:]}") from None
        seconds = time.perf_counter() - begun_s
        engine.signal(signal.SIGSTOP)
        yield engine, seconds
    finally:
        with suppress(ProcessLookupError):
            engine.signal(signal.SIGKILL)
        process.wait()


def main() -> None:
    args = arguments()
    end_as_asked()
    names = [pair.partition("=")[0] for pair in args.engine]
    samples_file = args.samples or RESULTS / f"{args.what}.jsonl"
    samples = (
        [json.loads(line) for line in samples_file.read_text().splitlines()]
        if samples_file.exists()
        else []
    )
    if (others := {x["engine"] for x in samples}) - set(names):
        raise SystemExit(
            f"{samples_file} has samples of {sorted(others)}: "
            "delete it, or name another with --samples"
        )
    until_s = time.perf_counter() + 60 * args.minutes
    with ExitStack() as stack, samples_file.open("a") as out:
        for sample in measure(args, stack, samples, until_s):
            samples.append(sample)
            print(json.dumps(sample), file=out, flush=True)
    rows = [
        row_of(case, names, samples) for case in args.case if len(of(samples, case, names[0])) > 0
    ]
    starts = {
        name: statistics.median(x["seconds"] for x in of(samples, START, name)) for name in names
    }
    shown = table(rows, starts, names)
    if len(of(samples, args.case[-1], names[-1])) < args.rounds:
        print(shown)
        raise SystemExit(f"not finished: the same command resumes ({samples_file})")
    versions = {x["engine"]: x["version"] for x in samples if x["case"] == START}
    found = {
        "model": args.model.name,
        "engines": versions,
        "cases": rows,
        "start_s": starts,
        "samples": samples,
    }
    save(args.what, args, found, shown)
    if not args.no_save:
        samples_file.unlink()


def arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("model", type=Path, help="Hugging Face directory")
    flags.add_argument(
        "--engine",
        action="append",
        required=True,
        metavar="NAME[=PYTHON|=DIR]",
        help=", ".join([*ENGINES, *OF_SOURCES]),
    )
    flags.add_argument("--gguf", type=Path, help=f"the same weights for {', '.join(OF_GGUF)}")
    flags.add_argument(
        "--weight-bytes", type=float, default=2, help="bytes per parameter, for the floor [2]"
    )
    flags.add_argument(
        "--case", action="append", choices=CASES, help=f"{', '.join(CASES)} [the first five]"
    )
    flags.add_argument("--rounds", type=int, default=3, help="rounds of each case [3]")
    flags.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="[all allowed CPUs]"
    )
    flags.add_argument("--what", default="peers", help="first part of the result's name [peers]")
    flags.add_argument(
        "--samples", type=Path, help="samples so far, a line each [results/WHAT.jsonl]"
    )
    flags.add_argument(
        "--minutes", type=float, default=1e9, help="start no case after so many minutes"
    )
    args = flags.parse_args()
    args.case = args.case or USUAL
    for pair in args.engine:
        name, _, place = pair.partition("=")
        if name not in ENGINES and name not in OF_SOURCES:
            flags.error(f"no engine {name!r}: there are {', '.join([*ENGINES, *OF_SOURCES])}")
        if name in OF_GGUF and args.gguf is None:
            flags.error(f"{pair} needs --gguf FILE")
        if name in OF_SOURCES and not list(Path(place, "build").rglob("libllama.so")):
            flags.error(f"{pair}: there is no build/**/libllama.so in {place or 'it'}")
    return args


def measure(
    args: argparse.Namespace, stack: ExitStack, samples: Sequence[Sample], until_s: float
) -> Iterator[Sample]:
    """Yield the samples that are still missing.

    Engines are started only if there are any, and `stack` stops them.
    """
    known = {(x["case"], x["round"]) for x in samples}
    todo = [
        (CASES[name], i) for i in range(args.rounds) for name in args.case if (name, i) not in known
    ]
    if not todo:
        return
    spec = read_model_spec(args.model)
    machine = stack.enter_context(compiled_machine(args.threads))
    engines = []
    for pair in args.engine:
        name, _, place = pair.partition("=")
        target = args.gguf if name in OF_GGUF else args.model
        log = RESULTS / f"{name}.log"
        engine, seconds = stack.enter_context(
            started(name, place or sys.executable, target, args.threads, log)
        )
        engines.append(engine)
        yield {
            "case": START,
            "round": -1,
            "engine": name,
            "version": engine.version,
            "seconds": seconds,
        }
        print(f"{name} {engine.version}: first answer after {seconds:.1f} s", file=sys.stderr)
    for engine in engines:
        engine.ask(prompts_of(WARM_UP, spec.vocab_size, -1), WARM_UP.new_tokens)
    for case, number in todo:
        if time.perf_counter() > until_s:
            return
        first = number % len(engines)
        rates = machine.rates()
        floor = floor_tokens_per_s(spec, case, rates, args.weight_bytes)
        yield from one_case(
            case, number, engines[first:] + engines[:first], rates, floor, spec.vocab_size
        )


def one_case(
    case: Case, number: int, engines: Sequence[Engine], rates: Rates, floor: float, vocab_size: int
) -> list[Sample]:
    """Return a sample of each engine with the same prompts.

    If one engine fails, no sample of the round is kept.
    """
    prompts = prompts_of(case, vocab_size, number)
    busy = psutil.cpu_percent(BUSY_S)
    if busy > BUSY_PERCENT:
        print(
            f"other programs use {busy:.0f} % of the CPUs: this round is unreliable",
            file=sys.stderr,
        )
    samples = []
    for engine in engines:
        speed, _ = speed_of(engine, case, prompts)
        print(
            f"{case.name} round {number}: {engine.name} {speed:.1f} tokens/s, floor {floor:.0f}",
            file=sys.stderr,
        )
        sample = {
            "case": case.name,
            "round": number,
            "engine": engine.name,
            "tokens_per_s": speed,
            "floor": floor,
        }
        samples.append(sample | asdict(rates) | {"others_percent": busy})
    return samples


def speed_of(engine: Engine, case: Case, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Return tokens per second, of the prompts or of decoding alone, and each answer's tokens."""
    first_s, tokens = engine.ask(prompts, 1)
    if case.is_prefill:
        return case.batch * case.prompt_tokens / first_s, tokens
    seconds, tokens = engine.ask(prompts, case.new_tokens)
    return case.batch * (case.new_tokens - 1) / (seconds - first_s), tokens


def prompts_of(case: Case, vocab_size: int, number: int) -> list[list[int]]:
    """Return random token ids, different in every round."""
    rng = random.Random(f"{case.name} {number}")
    return [
        [rng.randrange(3, vocab_size) for _ in range(case.prompt_tokens)] for _ in range(case.batch)
    ]


def of(samples: Sequence[Sample], case: str, engine: str) -> list[Sample]:
    """Return the samples of an engine in a case, in the order of rounds."""
    return sorted(
        (x for x in samples if (x["case"], x["engine"]) == (case, engine)), key=lambda x: x["round"]
    )


def row_of(case: str, names: Sequence[str], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return medians over the rounds. `ratio` is the first engine's speed over each one's."""
    each = {name: of(samples, case, name) for name in names}
    ours = each[names[0]]
    return {
        "case": case,
        "tokens_per_s": {
            name: statistics.median(x["tokens_per_s"] for x in each[name]) for name in names
        },
        "ratio": {
            name: statistics.median(
                a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, each[name], strict=True)
            )
            for name in names
        },
        "floor": statistics.median(x["floor"] for x in ours),
        "share_of_floor": {
            name: statistics.median(x["tokens_per_s"] / x["floor"] for x in each[name])
            for name in names
        },
    }


def table(rows: Sequence[dict[str, Any]], starts: dict[str, float], names: Sequence[str]) -> str:
    """Return the results as a Markdown table.

    Columns are tokens/s by engine, the first engine's ratio to each other one, the floor, and the
    first engine's share of it.
    """
    heads = [
        "tokens per second",
        *names,
        *[f"{names[0]} / {name}" for name in names[1:]],
        "floor",
        "share of floor",
    ]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        speeds = [f"{row['tokens_per_s'][name]:.1f}" for name in names]
        ratios = [f"{row['ratio'][name]:.2f}" for name in names[1:]]
        lines.append(
            [
                row["case"],
                *speeds,
                *ratios,
                f"{row['floor']:.0f}",
                f"{row['share_of_floor'][names[0]]:.2f}",
            ]
        )
    lines.append(
        [
            "seconds to first answer",
            *[f"{starts[name]:.1f}" for name in names],
            *[""] * (len(names) + 1),
        ]
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    main()
