"""docs/reading-the-code.md lists the path of a request: a traced server passes those files and no
others.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
# Three of them read the answer in its tool format; five fit the conversation to the template.
MOST_FILES = 77


def reading_list() -> tuple[list[str], set[str]]:
    """Return two lists: the files on a request's path, in order, and those that run on timers.

    A request may or may not reach the latter.
    """
    page = (ROOT / "docs" / "reading-the-code.md").read_text().partition("\n## ")[0]
    path, _, timers = page.partition("\nBeside the path, on timers:")
    assert timers
    files = re.compile(r"`((?:moeserve|kernels)/[a-z0-9_/]+\.py)`")
    return files.findall(path), set(files.findall(timers.partition("\n\n")[0]))


def get(url: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=30) as answer:
        read: bytes = answer.read()
        return read


def catches(pid: int) -> bool:
    """Return whether a process has the tracer's handler; SIGUSR1 would end any other process."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*([0-9a-f]+)", status)[1], 16)  # type: ignore[index]
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which processes are traced")
def test_one_request_passes_the_listed_files(tmp_path: Path) -> None:
    listed, on_timers = reading_list()
    assert len(listed) == len(set(listed))
    assert [path for path in listed if not (ROOT / path).is_file()] == []
    passed = traced(tmp_path, free_port())
    assert sorted(passed - set(listed) - on_timers) == [], (
        "a request passes files that the page does not list"
    )
    assert sorted(set(listed) - passed) == [], "the page lists files that no request passes"
    assert len(listed) <= MOST_FILES


def traced(folder: Path, port: int) -> set[str]:
    """Return the files that a server's processes pass while they answer a streamed request."""
    tracer = f"{ROOT / 'tests/integration/tracer'}{os.pathsep}{ROOT}"
    env = {**os.environ, "MOESERVE_TRACE": str(folder), "PYTHONPATH": tracer}
    command = [sys.executable, "-m", "moeserve.cli.main", "serve", "--port", str(port)]
    server = subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until_ready(url)
        ask(url, "Tell me a story about a cat.")  # what happens once is not on every request's path
        processes = [
            psutil.Process(server.pid),
            *psutil.Process(server.pid).children(recursive=True),
        ]
        pids = [process.pid for process in processes if catches(process.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        ask(url, "Tell me a story about a fox and a lantern.")
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        while len(found := [path for path in folder.iterdir() if path.name.isdigit()]) < len(pids):
            time.sleep(0.05)
    finally:
        server.terminate()
        server.wait(30)
    files = {os.path.realpath(line) for path in found for line in path.read_text().splitlines()}
    return {os.path.relpath(path, ROOT) for path in files}


def until_ready(url: str) -> None:
    while True:
        try:
            get(f"{url}/readyz")
            return
        except OSError:
            time.sleep(0.1)


def ask(url: str, prompt: str) -> None:
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 16}
    assert b"[DONE]" in get(f"{url}/v1/chat/completions", body)
