"""Shared by the benchmark scripts: servers to measure, their processes, and files of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

from moeserve.cli import collect_env

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
START_TIMEOUT_S = 600.0
AT_MOST_AVX2 = os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"  # both torch and moeserve obey it


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every script has."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--hardware",
        default=hardware_name(),
        help="this machine's name in the file's name [%(default)s]",
    )
    made.add_argument("--note", default="", help="facts that readers need, such as what else ran")
    made.add_argument("--no-save", action="store_true", help="print only")
    return made


def save(what: str, args: argparse.Namespace, results: Any, shown: str | None = None) -> None:
    """Print the results, or `shown`, and write them to a file unless --no-save is given.

    The file is results/<what>_<hardware>_<yyyymm>.json, with the command and the environment.
    """
    now = datetime.now(UTC)
    record = {
        "what": what,
        "date": now.isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "command": command_line(),
        "note": args.note,
        "environment": environment(),
        "results": results,
    }
    text = json.dumps(record, indent=1)
    print(json.dumps(results, indent=1) if shown is None else shown)
    if not args.no_save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{what}_{args.hardware}_{now:%Y%m}.json"
        path.write_text(text + "\n", "utf-8")
        print(f"saved in {path.relative_to(ROOT)}", file=sys.stderr)


def end_as_asked() -> None:
    """Let SIGTERM end this process as Ctrl-C does.

    Otherwise processes that it has started and stopped by SIGSTOP would stay behind.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def environment() -> dict[str, Any]:
    """Return versions and hardware, without this machine's names and paths."""
    found = collect_env.collect()
    found["platform"] = (
        f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}"
    )
    found["environment"] = {k: v for k, v in found["environment"].items() if "/" not in v}
    found["torch"].pop("build", None)
    found["cpu"] = may_use(found["cpu"])
    return found


def command_line() -> str:
    """Return the command as a reader would type it, with absolute paths cut to their last part."""
    words = [re.sub(r"^([\w-]+=)?/.*/", r"\1", word) for word in sys.argv[1:]]
    return " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])


def hardware_name() -> str:
    """Return CPU, allowed cores and instruction set, such as amd-epyc-2c-avx512bf16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = may_use(collect_env.cpu())
    model = re.sub(r"\(.*?\)|processor|cpu|@.*|\d+-core", "", cpu["model"].lower())
    return "-".join([*re.findall(r"[a-z0-9]+", model), f"{cores}c", instruction_set(cpu["flags"])])


def may_use(cpu: dict[str, Any]) -> dict[str, Any]:
    """Return `cpu` with only those flags whose instructions kernels may use."""
    return cpu | {"flags": [flag for flag in cpu["flags"] if not AT_MOST_AVX2 or flag == "avx2"]}


def instruction_set(flags: Sequence[str]) -> str:
    """Return the widest vector instructions, which decide the native kernels' speed."""
    sets = {"avx512_bf16": "avx512bf16", "avx512f": "avx512", "avx2": "avx2"}
    return next((name for flag, name in sets.items() if flag in flags), platform.machine().lower())


def git(*words: str) -> str:
    """Return the output of a git command."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Return median, range and all samples."""
    ordered = sorted(samples)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return {"median": median, "min": ordered[0], "max": ordered[-1], "samples": list(samples)}


@dataclass(slots=True)
class Server:
    """A `moeserve serve` process on a loopback port. Times are seconds since its start."""

    process: psutil.Popen
    port: int
    log: Path
    started_s: float

    def get(self, path: str, timeout_s: float = 5.0) -> int | None:
        """Return the status of a GET, or None if nobody answers."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return None
        finally:
            connection.close()

    def wait(self, path: str, pause_s: float = 0.002) -> float:
        """Return the seconds from process start until `path` answers 200.

        Raises SystemExit if the process dies or takes longer than START_TIMEOUT_S.
        """
        while self.get(path) != 200:
            if self.process.poll() is not None:
                raise SystemExit(
                    f"the server ended with {self.process.returncode}:\n"
                    f"{self.log.read_text()[-3000:]}"
                )
            if time.perf_counter() - self.started_s > START_TIMEOUT_S:
                raise SystemExit(f"{path} did not answer 200 within {START_TIMEOUT_S:g} s")
            time.sleep(pause_s)
        return time.perf_counter() - self.started_s

    def post(self, path: str, body: Any) -> Any:
        """Return the decoded answer to a JSON POST; raise SystemExit unless its status is 200."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise SystemExit(f"{path}: {response.status} {answer[:500]!r}")
            return json.loads(answer)
        finally:
            connection.close()

    def tree(self) -> dict[str, psutil.Process]:
        """Return the server's processes by role: front_end, engine, other_<number>."""
        roles = {"front_end": psutil.Process(self.process.pid)}
        for child in roles["front_end"].children(recursive=True):
            is_engine = child.name() == "moeserve-engine" or any(
                "engine_main" in word for word in child.cmdline()
            )
            roles["engine" if is_engine and "engine" not in roles else f"other_{len(roles)}"] = (
                child
            )
        return roles


# Otherwise packed weights would be written to disk while the first requests are measured.
NO_CACHE = 'model:\n  packed_cache: "off"\n'


@contextmanager
def running_server(
    model: str,
    *flags: str,
    config: str = NO_CACHE,
    cores: set[int] | None = None,
    root: Path = ROOT,
) -> Iterator[Server]:
    """Run `moeserve serve MODEL flags` and stop it at the end.

    The server gets a YAML config, is pinned to `cores` (its children too), and runs the code of the
    checkout `root`.
    """
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-") as folder:
        log = Path(folder, "log")
        file = Path(folder, "config.yaml")
        file.write_text(config, "utf-8")
        port = free_port()
        words = [
            sys.executable,
            "-m",
            "moeserve.cli.main",
            "serve",
            model,
            "--port",
            str(port),
            "--config",
            str(file),
        ]
        env = {**os.environ, "PYTHONPATH": str(root)}
        with log.open("wb") as out:
            started_s = time.perf_counter()
            process = psutil.Popen(
                [*words, *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=root,
                env=env,
            )
        if cores is not None:
            process.cpu_affinity(list(cores))  # inherited by the children that it starts later
        try:
            yield Server(process, port, log, started_s)
        finally:
            stop(process)


def stop(process: psutil.Popen, within_s: float = 40.0) -> None:
    """End a process by SIGTERM, and by SIGKILL after `within_s` seconds."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(within_s)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return an unused TCP port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_seconds(tree: Mapping[str, psutil.Process]) -> dict[str, float]:
    """Return the CPU time (user and kernel) of each process, summed over its live threads.

    On Linux it is exact to nanoseconds.
    """
    used = {}
    for role, process in tree.items():
        threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        used[role] = sum(int(thread.read_text("ascii").split()[0]) for thread in threads) / 1e9
    return used


def peak_rss_bytes(process: psutil.Process) -> int:
    """Return the process's peak resident memory (Linux), mapped file pages included."""
    status = Path(f"/proc/{process.pid}/status").read_text("utf-8")
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None, status
    return int(match[1]) * 1024


def weight_bytes(model: str) -> int:
    """Return the size of a model's files of weights ("demo": the model in the package)."""
    return sum(file.stat().st_size for file in weight_files(model))


def weight_files(model: str) -> list[Path]:
    """Return a model directory's safetensors files, or the GGUF file."""
    folder = ROOT / "moeserve/assets/demo" if model == "demo" else Path(model)
    return [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
