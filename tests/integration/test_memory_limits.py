"""Servers in a control group with less and less memory: one that is let through is never killed.

Needs the right to make control groups with a memory limit (root, or a delegated group).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.conftest import Server
from tests.ports import free_port

MIB = 2**20
ROOTS = (  # folder of control groups, its file of a limit, and that of kills
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.oom_control"),  # version 1
    (Path("/sys/fs/cgroup"), "memory.max", "memory.events"),
)
CONFIG = {  # 144 MiB of experts, 16 MiB of other weights, and 16 KiB of KV cache per token
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "max_position_embeddings": 4608,
    "torch_dtype": "bfloat16",
}
SETTINGS = "model:\n  load_format: dummy\n  skip_tokenizer_init: true\n  packed_cache: {}\n"
DOES_NOT_FIT = 5  # exit code (errors.py)


class ControlGroup:
    """A control group with a memory limit."""

    def __init__(self, root: Path, limit_file: str, kills_file: str, num_bytes: int) -> None:
        self.folder = root / f"moeserve-test-{os.getpid()}"
        self.folder.mkdir()
        self._kills = self.folder / kills_file
        (self.folder / limit_file).write_text(str(num_bytes))

    def join(self) -> None:
        """Move this process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def num_killed(self) -> int:
        """The number of processes that were killed because of the limit."""
        words = self._kills.read_text().split()
        return int(words[words.index("oom_kill") + 1])

    def close(self) -> None:
        """Remove the group, once its processes have ended."""
        deadline = time.monotonic() + 30
        while True:
            try:
                self.folder.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


@contextmanager
def control_group(num_bytes: int) -> Iterator[ControlGroup]:
    """Yield a new group. Skips the test if none can be made."""
    reason = "no control group of this machine has the memory controller"
    for root, limit_file, kills_file in ROOTS:
        if not (root / "cgroup.procs").exists():
            continue
        try:
            group = ControlGroup(root, limit_file, kills_file, num_bytes)
        except OSError as error:
            reason = f"control groups cannot be limited here: {error}"
            continue
        try:
            yield group
        finally:
            group.close()
        return
    pytest.skip(reason)


@contextmanager
def server_in(group: ControlGroup, folder: Path, *flags: str) -> Iterator[Server]:
    """Yield a server in the group, which may not be ready yet."""
    port = free_port()
    log = folder / "log"
    words = ["-m", "moeserve.cli.main", "serve", str(folder), "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *words, "--threads", "1", *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=group.join,
        )
    try:
        yield Server(process, port, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def fill(server: Server) -> list[int]:
    """Use the whole context, then many slots at once. Return the answers' status."""
    length = json.loads(server.get("/v1/models")[1])["data"][0]["max_model_len"]

    def ask(number: int, num_prompt: int) -> int:
        prompt = [(7 * i + number) % 4000 for i in range(num_prompt)]
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 1}
        return server.post("/v1/completions", body)[0]

    found = [ask(0, length - 5)]
    with ThreadPoolExecutor(32) as pool:
        found += pool.map(lambda number: ask(number, min(length - 5, 60)), range(32))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limited")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "settings.yaml").write_text(SETTINGS.format(folder / "packed"))
    return folder


@pytest.mark.full("ranks", keep=1)
@pytest.mark.parametrize("size", [700, 340, 460, 540, 580, 620, 660, 760, 900, 2000])
@pytest.mark.timeout(400)
def test_a_start_that_is_let_through_is_never_killed(size: int, model: Path) -> None:
    """Neither while it loads, nor by requests. `size`: MiB of memory, for all its processes."""
    with (
        control_group(size * MIB) as group,
        server_in(group, model, "--config", str(model / "settings.yaml")) as server,
    ):
        try:
            server.wait_ready(240)
        except AssertionError:
            text = server.log.read_text()
            assert group.num_killed == 0, text
            assert server.process.poll() == DOES_NOT_FIT, text
            assert size < 800, text
            assert "Considered: int8 keys and values (" in text
            return
        assert set(fill(server)) == {200}
        assert group.num_killed == 0
        status = json.loads(server.get("/readyz")[1])
        chosen = {note.split(" ")[0] for note in status["notes"]}
        text = server.log.read_text()
        assert all(note in text for note in status["notes"])
        assert chosen == set() or size < 2000
        assert server.stop() == 0
