"""The command line as a whole: quick, lazy, helpful, and right about exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from moeserve import errors
from moeserve.cli import main
from moeserve.cli.config import Check
from moeserve.cli.main import COMMANDS
from moeserve.version import __version__

HEAVY = (
    "torch",
    "transformers",
    "aiohttp",
    "numpy",
    "tokenizers",
    "jinja2",
    "yaml",
    "zmq",
    "asyncio",
    "argparse",
)


def imported_by(*argv: str) -> set[str]:
    code = (
        f"import sys; from moeserve.cli.main import main; main({list(argv)!r}); "
        "print('MODULES', *sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return set(out.rsplit("MODULES", 1)[1].split())


def test_version_imports_nothing_heavy() -> None:
    assert not imported_by("--version") & set(HEAVY)
    assert not imported_by("--help") & set(HEAVY)


def test_version_is_quick() -> None:
    """It takes hardly more CPU time than Python itself, which starts in 20 to 50 ms."""

    def seconds(*words: str) -> float:
        before = os.times()
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
        assert done.stdout == f"moeserve {__version__}\n"
        after = os.times()
        return (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )

    alone = [seconds("-c", f"print('moeserve {__version__}')") for _ in range(3)]
    assert min(seconds("-m", "moeserve.cli.main", "--version") for _ in range(3)) < 4 * min(alone)


def test_no_command_line_needs_torch_or_transformers() -> None:
    code = (
        "import sys; from moeserve.cli.main import build_parser\n"
        f"for name in {list(COMMANDS)}:\n"
        "    build_parser(name)\n"
        "    assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules), name"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_fits_a_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main([*name.split(), "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert f"usage: moeserve {name}" in text
    assert len(text.splitlines()) <= 80


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert len(text.splitlines()) <= 35
    assert main.main([]) == 2
    assert main.main(["bench", "--help"]) == 0
    assert main.main(["bench"]) == 2


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["serv"], "did you mean `moeserve serve`?"),
        (["bench", "latencies"], "did you mean `moeserve bench latency`?"),
        (["config", "shwo"], "did you mean `moeserve config show`?"),
        (["qqqqqqqqqq"], "`moeserve --help` lists the commands"),
    ],
)
def test_an_unknown_command_gets_the_nearest(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(argv) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["serve", "--max-modl-len", "3"], "did you mean --max-model-len?"),
        (["serve", "--served-model-name", "a", "b", "c"], "'c'; `moeserve serve --help` lists"),
        (["serve", "--max-model"], "did you mean --max-model-len?"),  # no abbreviations
        (["config", "show", "--prt=3"], "did you mean --port?"),
        (["chat", "--zzzzzzzzz"], "`moeserve chat --help` lists"),
    ],
)
def test_an_unknown_flag_gets_the_nearest(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(argv)
    assert end.value.code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("cause and fix"), 2),
        (errors.CheckpointError("cause and fix"), 3),
        (errors.AddressInUse("cause and fix"), 4),
        (errors.DoesNotFit("cause and fix"), 5),
        (errors.Unreachable("cause and fix"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: Any) -> int:
        raise error

    monkeypatch.setattr(Check, "run", fail)
    assert main.main(["config", "check", "x.yaml"]) == code
    text = capsys.readouterr().err
    assert text == ("" if code == 130 else "moeserve config check: cause and fix\n")


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Check, "run", lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main.main(["config", "check", "x.yaml"])


def test_serve_passes_its_settings_on(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []
    fake = SimpleNamespace(serve=lambda config: got.append(config) or 7)
    monkeypatch.setitem(sys.modules, "moeserve.server.run", fake)  # type: ignore[arg-type]
    assert main.main(["serve", "some/model", "--port", "0", "--max-num-seqs", "2k"]) == 7
    assert (got[0].model.model, got[0].server.port, got[0].scheduler.max_num_seqs) == (
        "some/model",
        0,
        2000,
    )


@pytest.mark.parametrize("words", ["config show", "--help", "bench --help", "serve --help"])
def test_a_reader_that_leaves_is_no_traceback(words: str) -> None:
    # The reader is gone before the first byte, so that even one line of output meets a broken pipe.
    command = f"(sleep 0.3; exec {sys.executable} -m moeserve.cli.main {words}) | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
