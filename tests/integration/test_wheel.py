"""A wheel, installed where there is no compiler, serves the demo by native kernels, with the tokens
of the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANSWER = """
import moeserve, sys
from moeserve import LLM, SamplingParams
from moeserve.ops.native import native
out = LLM("demo").generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=12))
print(native().supported_isas(), out[0].outputs[0].token_ids)
print(moeserve.__file__, file=sys.stderr)
"""

pytestmark = [
    pytest.mark.full("wheel"),
    pytest.mark.timeout(
        900
    ),  # it compiles all kernels, and asks the package index for what builds it
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="needs a C++ compiler to build the wheel"
    ),
]


def test_a_wheel_needs_no_compiler(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    env = tmp_path / "env"
    for name in ("moeserve", "kernels", "csrc"):
        shutil.copytree(
            ROOT / name,
            sources / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("*.so", "__pycache__"),
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, sources)
    run(sys.executable, "-m", "pip", "wheel", str(sources), "--no-deps", "-q", "-w", str(tmp_path))
    (wheel,) = tmp_path.glob("moeserve-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("moeserve/_native") for name in names), (
        "the extension did not compile"
    )
    assert not [
        name for name in names if name.startswith(("tests/", "benchmarks/", "tools/", "csrc/"))
    ]
    run(sys.executable, "-m", "venv", str(env))
    python = env / "bin" / "python"
    # The dependencies of this environment, without what makes the sources importable.
    site = Path(
        run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel))
    bare = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {
        "PATH": str(env / "bin")
    }
    installed = run(str(python), "-c", ANSWER, cwd=tmp_path, env=bare)
    assert installed == run(sys.executable, "-c", ANSWER, cwd=ROOT, env=dict(os.environ))
    assert "all: native" in run(
        str(env / "bin" / "moeserve"), "collect-env", cwd=tmp_path, env=bare
    )


def run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Return a command's output; its errors go to the test's."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
