"""Whole servers compared: `moeserve serve` and `vllm serve` under the same load, in turns.

    python -m benchmarks.serve_peers MODEL --vllm PYTHON

PYTHON is the interpreter of an environment with vLLM (peers.md). The load is `moeserve bench
serve`. Both servers and the client share the CPUs, and the server that is not measured is stopped
(SIGSTOP). Both get the same requests, with random lengths about the means of ShareGPT
conversations.

Samples are appended to a file as they come, and the same command resumes where the last one ended
(--minutes ends it early). At the end a table is printed, and all samples are saved.

Targets at 16 and 64 streams: 1.5 times the output tokens per second, 0.6 times the p99 time to
first token.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, START_TIMEOUT_S, end_as_asked, free_port, parser, save
from benchmarks.peers import environment_of

NAMES = ("moeserve", "vllm")
INPUT_TOKENS = 224  # mean: from 45 to 403
OUTPUT_TOKENS = 160  # mean: from 32 to 288
SPREAD = 0.8  # largest relative distance from the mean
FIGURES = {
    "output_throughput": "output tokens/s",
    "p99_ttft_ms": "p99 TTFT, ms",
    "p99_itl_ms": "p99 ITL, ms",
}
Sample = dict[str, Any]


@dataclass(slots=True)
class Server:
    """A ready server, stopped except while it is measured."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the server."""
        os.killpg(self.process.pid, number)

    def wait_ready(self) -> None:
        """Wait until /health answers 200.

        Raises SystemExit with the end of the log if the server dies or takes too long.
        """
        deadline_s = time.perf_counter() + START_TIMEOUT_S
        while self._status() != 200:
            if self.process.poll() is not None or time.perf_counter() > deadline_s:
                raise SystemExit(f"{self.name} does not serve:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)

    def _status(self) -> int | None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        with suppress(OSError):
            connection.request("GET", "/health")
            return connection.getresponse().status
        return None


def main() -> None:
    args = arguments()
    end_as_asked()
    samples_file = args.samples or RESULTS / "serve-peers.jsonl"
    samples = (
        [json.loads(line) for line in samples_file.read_text().splitlines()]
        if samples_file.exists()
        else []
    )
    known = {(x["streams"], x["round"]) for x in samples}
    todo = [(n, i) for i in range(args.rounds) for n in args.streams if (n, i) not in known]
    until_s = time.perf_counter() + 60 * args.minutes
    with ExitStack() as stack, samples_file.open("a") as out:
        servers = [stack.enter_context(started(name, args)) for name in NAMES if todo]
        for streams, number in todo:
            if time.perf_counter() > until_s:
                break
            pair = [measured(s, args, streams, number) for s in servers[:: 1 if number % 2 else -1]]
            samples += pair
            print("\n".join(map(json.dumps, pair)), file=out, flush=True)
    shown = table(samples, args.streams)
    if len(samples) < len(NAMES) * len(args.streams) * args.rounds:
        print(shown)
        raise SystemExit(f"not finished: the same command resumes ({samples_file})")
    save("serve-peers", args, {"model": args.model.name, "samples": samples}, shown)
    if not args.no_save:
        samples_file.unlink()


def arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("model", type=Path, help="Hugging Face directory")
    flags.add_argument("--vllm", required=True, metavar="PYTHON", help="interpreter with vLLM")
    flags.add_argument(
        "--streams", type=int, nargs="+", default=[16, 64], help="requests at once [16 64]"
    )
    flags.add_argument("--requests", type=int, default=3, help="requests per stream [3]")
    flags.add_argument("--rounds", type=int, default=2, help="number of rounds [2]")
    flags.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="[all allowed CPUs]"
    )
    flags.add_argument(
        "--samples", type=Path, help="samples so far, a line each [results/serve-peers.jsonl]"
    )
    flags.add_argument(
        "--minutes", type=float, default=1e9, help="start nothing after so many minutes"
    )
    return flags.parse_args()


@contextmanager
def started(name: str, args: argparse.Namespace) -> Iterator[Server]:
    """Yield a server that is warm and stopped by SIGSTOP; kill it at the end."""
    port = free_port()
    common = [
        "--port",
        str(port),
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        "256",
        "--no-enable-prefix-caching",
    ]
    if name == "vllm":
        python = args.vllm
        # Stands in for `vllm serve`, which does not start in vLLM's package for CPUs.
        module = "vllm.entrypoints.openai.api_server"
        command = [python, "-m", module, "--model", args.model, "--dtype", "bfloat16", *common]
    else:
        python = sys.executable
        flags = ["--threads", str(args.threads)]
        command = [python, "-m", "moeserve.cli.main", "serve", args.model, *flags, *common]
    log = RESULTS / f"{name}-serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment_of(name, python, args.threads),
            cwd=ROOT,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    server = Server(name, process, port, log)
    try:
        server.wait_ready()
        bench(server, args, streams=4, requests=4, seed=1_000_000)  # touches every weight
        server.signal(signal.SIGSTOP)
        yield server
    finally:
        with suppress(ProcessLookupError):
            server.signal(signal.SIGKILL)
        process.wait()


def measured(server: Server, args: argparse.Namespace, streams: int, number: int) -> Sample:
    """Measure one load level: `requests` per stream, equal for all servers in a round."""
    server.signal(signal.SIGCONT)
    found = bench(
        server, args, streams, requests=streams * args.requests, seed=1000 * number + streams
    )
    server.signal(signal.SIGSTOP)
    figures = {name: found[name] for name in FIGURES}
    shown = ", ".join(f"{title} {figures[name]:.1f}" for name, title in FIGURES.items())
    print(f"{streams} streams, round {number}: {server.name}: {shown}", file=sys.stderr)
    return {
        "engine": server.name,
        "streams": streams,
        "round": number,
        "failed": found["failed"],
        **figures,
    }


def bench(
    server: Server, args: argparse.Namespace, streams: int, requests: int, seed: int
) -> dict[str, Any]:
    """Return the report of `moeserve bench serve`.

    Prompts are token ids, so that tokenizers are not measured.
    """
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-") as folder:
        flags = {
            "base-url": f"http://127.0.0.1:{server.port}",
            "random-vocab-size": vocab_size,
            "random-input-len": INPUT_TOKENS,
            "random-output-len": OUTPUT_TOKENS,
            "random-range-ratio": SPREAD,
            "num-prompts": requests,
            "max-concurrency": streams,
            "seed": seed,
            "temperature": 0,
            "result-dir": folder,
            "result-filename": "result.json",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command = [
            sys.executable,
            "-m",
            "moeserve.cli.main",
            "bench",
            "serve",
            "--save-result",
            "--disable-tqdm",
        ]
        done = subprocess.run(
            [*command, *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"{server.name}: {done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    if found["failed"]:
        raise SystemExit(
            f"{server.name}: {found['failed']} of {requests} requests failed:\n"
            f"{done.stderr[-3000:]}"
        )
    return found


def table(samples: Sequence[Sample], streams: Sequence[int]) -> str:
    """Return a Markdown table: medians over the rounds, and the median of the rounds' ratios."""
    lines = ["| figure | " + " | ".join(NAMES) + " | ratio |", "|---|---|---|---|"]
    for count in streams:
        rounds = {
            name: [x for x in samples if (x["engine"], x["streams"]) == (name, count)]
            for name in NAMES
        }
        if not rounds[NAMES[0]]:
            continue
        for key, title in FIGURES.items():
            ours, theirs = (
                [x[key] for x in sorted(rounds[name], key=lambda x: x["round"])] for name in NAMES
            )
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            medians = f"{statistics.median(ours):.1f} | {statistics.median(theirs):.1f}"
            lines.append(f"| {title}, {count} streams | {medians} | {ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
