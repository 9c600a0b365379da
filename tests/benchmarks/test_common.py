"""The records that benchmarks leave, and the counting of streamed events."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import common
from benchmarks.streaming import END, Reader


def test_a_record_says_what_when_where_and_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "ROOT", tmp_path.parent)
    monkeypatch.setattr(
        "sys.argv", ["/somewhere/benchmarks/thing.py", "--model", "/secret/place/model"]
    )
    monkeypatch.setenv("LD_PRELOAD_X", "/secret/lib.so")
    args = common.parser("doc").parse_args(["--hardware", "box-2c", "--note", "alone"])
    common.save("thing", args, {"x": common.summary([3.0, 1.0, 2.0])})
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"thing_box-2c_\d{6}\.json", file.name)
    record = json.loads(file.read_text())
    assert record["command"] == "python -m benchmarks.thing --model model"
    assert record["note"] == "alone"
    assert record["results"]["x"] == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "samples": [3.0, 1.0, 2.0],
    }
    assert record["environment"]["packages"]["torch"]
    assert "/secret" not in file.read_text()
    assert json.loads(capsys.readouterr().out) == record["results"]


def test_the_median_of_an_even_count_lies_between() -> None:
    assert common.summary([4.0, 1.0, 2.0, 3.0])["median"] == 2.5


def test_commands_have_no_paths_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "/a/peers.py",
        "/b/hf",
        "--engine",
        "llamacpp=/c/bin/python",
        "--engine",
        "moeserve-gguf=/e/bin/python",
        "--weight-bytes",
        "0.6",
        "d/e",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert common.command_line() == (
        "python -m benchmarks.peers hf --engine llamacpp=python --engine moeserve-gguf=python "
        "--weight-bytes 0.6 d/e"
    )


def test_hardware_names_are_file_names() -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*-\d+c-\w+", common.hardware_name())


def test_machines_with_other_instructions_write_other_files() -> None:
    sets = [["avx2"], ["avx2", "avx512f"], ["avx2", "avx512f", "avx512_bf16"]]
    assert [common.instruction_set(flags) for flags in sets] == ["avx2", "avx512", "avx512bf16"]


def test_committed_results_are_named_by_their_machine() -> None:
    for file in common.RESULTS.glob("*.json"):
        cpu = json.loads(file.read_text())["environment"]["cpu"]
        assert file.stem.split("_")[1].endswith("c-" + common.instruction_set(cpu["flags"])), (
            file.name
        )


def test_peak_memory_is_of_the_past() -> None:
    """A child takes 64 MiB and gives them back; the peak stays."""
    code = "b = bytearray(b'x') * (64 << 20); del b; print(flush=True); input()"
    with psutil.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert common.peak_rss_bytes(child) >= 60 * 2**20
        assert child.memory_info().rss < 60 * 2**20
        child.communicate(b"\n")


@pytest.mark.parametrize("size", [1, 2, 5, 7, 11, 64, 10_000])
def test_events_are_counted_once_however_they_are_cut(size: int) -> None:
    text = b": ping\n\n" + b'data: {"choices": [{"text": "x"}]}\n\n' * 9 + END
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = Reader(ours)
        for i in range(0, len(text), size):
            theirs.sendall(text[i : i + size])
            assert not reader.done
            reader.read()
        assert reader.events == 9
        assert reader.done
