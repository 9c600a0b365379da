"""Build the native extension; everything else about the package is in pyproject.toml.

    python setup.py -q build_ext --inplace    # what `make serve` and `make test` do first

A module that is newer than its sources is used again, also by `pip install -e .` and `pip wheel`.
The extension is optional: where it does not compile (no compiler, not Linux), the package installs
without it, and moeserve/ops/native.py says so.
"""

import platform
import shutil
import sys
import threading
import time
from glob import glob
from pathlib import Path
from typing import Any

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

# A fused multiply-add rounds once where the reference rounds twice, so contraction is off. Newer
# instructions are picked at run time: the module runs on any CPU of its architecture.
FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# GCC 12 takes the undefined operands of its own AVX-512 intrinsics for mistakes.
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-Wno-maybe-uninitialized"]
ISA_FLAGS = {
    "isa_avx2": AVX2,
    "isa_avx2_vnni": [*AVX2, "-mavxvnni"],
    "isa_avx512": AVX512,
    "isa_avx512_bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
    "isa_neon": [],
}
ISA_SOURCES = {"x86_64": "csrc/kernels/isa_avx*.cpp", "aarch64": "csrc/kernels/isa_neon*.cpp"}
FOLDERS = ("core", "pool", "kernels", "shm", "bindings")


def flags_of(source: str) -> list[str]:
    """Return the flags that one source adds to FLAGS: those of its instruction set, or a lower
    optimization level for bindings, which only convert arguments and take long to compile.
    """
    if "bindings" in Path(source).parts:
        return ["-O1"]
    isa = Path(source).stem.removesuffix("_product").removesuffix("_int")
    return ISA_FLAGS.get(isa, [])


def sources() -> list[str]:
    """Return the sources for this architecture."""
    found = {path for folder in FOLDERS for path in glob(f"csrc/{folder}/*.cpp")}
    found -= set(glob("csrc/kernels/isa_*.cpp"))
    found |= set(glob(ISA_SOURCES.get(platform.machine(), "")))
    return sorted(found)


def order(source: str) -> tuple[bool, bool, str]:
    """Return a sort key: sources that take longest to compile come first, so that no core idles."""
    stem = Path(source).stem
    return "product" not in stem, "isa_" not in stem, source


class Build(build_ext):
    """Compile each instruction set with its own flags, and print progress."""

    def build_extension(self, ext: Any) -> None:
        built = Path(self.get_ext_filename(ext.name))
        target = Path(self.get_ext_fullpath(ext.name))
        inputs = [*ext.sources, *ext.depends, __file__]
        if built.exists() and built.stat().st_mtime > max(Path(p).stat().st_mtime for p in inputs):
            if not (target.exists() and target.samefile(built)):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(built, target)
            return

        compile_all = self.compiler.compile
        compile_one = self.compiler._compile
        progress = Progress(len(ext.sources))

        def compile_source(
            obj: str, src: str, suffix: str, cc_args: Any, postargs: list[str], pp_opts: Any
        ) -> None:
            compile_one(obj, src, suffix, cc_args, [*postargs, *flags_of(src)], pp_opts)
            progress.step(src)

        def compile_longest_first(sources: list[str], *args: Any, **kwargs: Any) -> list[str]:
            return compile_all(sorted(sources, key=order), *args, **kwargs)

        self.compiler.compile = compile_longest_first
        self.compiler._compile = compile_source
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_all
            self.compiler._compile = compile_one


class Progress:
    """Prints a line for each compiled source."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.start_s = time.monotonic()
        self.lock = threading.Lock()  # sources are compiled in threads

    def step(self, source: str) -> None:
        with self.lock:
            self.done += 1
            elapsed_s = time.monotonic() - self.start_s
            print(f"[{self.done:2}/{self.total}] {elapsed_s:4.0f} s  {source}", file=sys.stderr)


ParallelCompile().install()  # on all cores

setup(
    cmdclass={"build_ext": Build},
    ext_modules=[
        Pybind11Extension(
            "moeserve._native",
            sources(),
            depends=sorted(glob("csrc/*/*.hpp")),
            include_dirs=["csrc"],
            cxx_std=20,
            extra_compile_args=FLAGS,
            optional=True,
        )
    ],
)
