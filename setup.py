"""The native extension; everything else about the package is in pyproject.toml.

Optional: where it does not compile (no compiler, not Linux), the package installs without it, and
moeserve/ops/native.py says so.
"""

import platform
from glob import glob
from pathlib import Path
from typing import Any

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

# A fused multiply-add rounds once where the reference rounds twice, so contraction is off. What is
# faster with newer instructions picks them at run time: the module runs on any CPU of its
# architecture.
FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# GCC 12 takes the undefined operands of its own AVX-512 intrinsics for mistakes.
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-Wno-maybe-uninitialized"]
ISA_FLAGS = {
    "isa_avx2": AVX2,
    "isa_avx2_vnni": [*AVX2, "-mavxvnni"],
    "isa_avx512": AVX512,
    "isa_avx512_bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
}
ISAS = {"x86_64": set(glob("csrc/kernels/isa_avx*.cpp")), "aarch64": {"csrc/kernels/isa_neon.cpp"}}


class Build(build_ext):
    """Gives every csrc/kernels/isa_*.cpp the flags of its instruction set."""

    def build_extension(self, ext: Any) -> None:
        compile_one = self.compiler._compile

        def compile_isa(
            obj: str, src: str, ext: str, cc_args: Any, postargs: list[str], pp_opts: Any
        ) -> None:
            compile_one(
                obj, src, ext, cc_args, [*postargs, *ISA_FLAGS.get(Path(src).stem, [])], pp_opts
            )

        self.compiler._compile = compile_isa
        try:
            super().build_extension(ext)
        finally:
            self.compiler._compile = compile_one


sources = {
    path
    for folder in ("core", "pool", "kernels", "shm", "bindings")
    for path in glob(f"csrc/{folder}/*.cpp")
}
sources -= set().union(*ISAS.values()) - ISAS.get(platform.machine(), set())

ParallelCompile().install()  # on all cores

setup(
    cmdclass={"build_ext": Build},
    ext_modules=[
        Pybind11Extension(
            "moeserve._native",
            sorted(sources),
            depends=sorted(glob("csrc/*/*.hpp")),
            include_dirs=["csrc"],
            cxx_std=20,
            extra_compile_args=FLAGS,
            optional=True,
        )
    ],
)
