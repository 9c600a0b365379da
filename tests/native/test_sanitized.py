"""Test programs in csrc/tests, compiled with a sanitizer each: what it sees ends them with an
error. Those of kernels run under an emulator of 64-bit ARM, too."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
X86 = platform.machine() == "x86_64"
COMMON = ["-std=c++20", "-O1", "-pthread", "-ffp-contract=off", "-Wno-psabi", "-Icsrc"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
ISAS = {
    "avx2": AVX2,
    "avx2_vnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512,
    "avx512_bf16": AVX512_BF16,
}
# Checks of every single pointer would take the compiler minutes, and find what AddressSanitizer
# finds.
MEMORY = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,alignment,pointer-overflow,object-size",
]
# The products are so long when unrolled that what lies on the stack is left out, and checks are
# calls.
HEAP = [
    "-fsanitize=address",
    "--param",
    "asan-instrumentation-with-call-threshold=0",
    "--param",
    "asan-stack=0",
]
THREADS = ["-fsanitize=thread"]
# g++-aarch64-linux-gnu, qemu-user-static
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"

pytestmark = [
    pytest.mark.full("sanitizers"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.timeout(480),  # the compiler takes 3 to 90 seconds of a core, which may be busy
]


@dataclass(frozen=True)
class Program:
    """csrc/tests/<name>_test.cpp, the parts of csrc that it is about, and what its kernels are
    compiled for.
    """

    name: str
    sources: tuple[str, ...]
    isa: tuple[str, ...] = ()

    def run(self, folder: Path, flags: list[str], *arguments: str) -> None:
        """Compiles the program for this CPU, and runs it."""
        names = {flag.removeprefix("-m") for flag in self.isa}
        if missing := names - cpu_flags():
            pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
        command = ["g++", *COMMON, *self.isa, *flags, "-fno-sanitize-recover=all"]
        self._check([], command, folder, *arguments, timeout_s=50)

    def emulate(self, folder: Path) -> None:
        """The same for 64-bit ARM, without a sanitizer."""
        self._check([EMULATOR], [CROSS_COMPILER, *COMMON, "-static"], folder, timeout_s=300)

    def _check(
        self, by: list[str], compiler: list[str], folder: Path, *arguments: str, timeout_s: int
    ) -> None:
        sources = [
            f"csrc/tests/{self.name}_test.cpp",
            *(f"csrc/{source}" for source in self.sources),
        ]
        binary = str(folder / self.name)
        subprocess.run([*compiler, *sources, "-o", binary], cwd=ROOT, check=True)
        done = subprocess.run(
            [*by, binary, *arguments], capture_output=True, text=True, timeout=timeout_s
        )
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


POOL = Program("pool", ("pool/pool.cpp", "pool/background.cpp"))
EXPERT_CACHE = Program("expert_cache", ("pool/expert_cache.cpp",))
ROWS = Program("rows", ("core/bitmask.cpp", "core/grouping.cpp", "core/pairs.cpp"), tuple(AVX2))
ATTENTION = Program(
    "attention",
    ("kernels/attention_plan.cpp", "kernels/reference_attention.cpp", "pool/pool.cpp"),
    tuple(AVX2),
)
RECURRENT: dict[str, tuple[str, ...]] = {"recurrence": (), "scans": ("core/top_k.cpp",)}
PRODUCTS = ("kernels/int_pack.cpp", "kernels/pack.cpp", "pool/pool.cpp")


def cpu_flags() -> set[str]:
    """Names of this CPU's extensions, as Linux spells them but for underscores; none elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if X86 and info.exists() else []
    return set(
        next((line for line in lines if line.startswith("flags")), "").replace("_", "").split()
    )


@pytest.mark.parametrize("flags", [MEMORY, THREADS], ids=["memory", "threads"])
def test_pool(flags: list[str], tmp_path: Path) -> None:
    POOL.run(tmp_path, flags)


@pytest.mark.parametrize("flags", [MEMORY, THREADS], ids=["memory", "threads"])
def test_experts_on_disk(flags: list[str], tmp_path: Path) -> None:
    EXPERT_CACHE.run(tmp_path, flags)


def test_rows(tmp_path: Path) -> None:
    ROWS.run(tmp_path, MEMORY)


@pytest.mark.parametrize("isa", [AVX2, AVX512], ids=["avx2", "avx512"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str, isa: list[str], tmp_path: Path) -> None:
    Program(name, RECURRENT[name], tuple(isa)).run(tmp_path, MEMORY)


def test_attention(tmp_path: Path) -> None:
    ATTENTION.run(tmp_path, MEMORY)


def test_attention_with_dot_products(tmp_path: Path) -> None:
    replace(ATTENTION, isa=(*AVX512, "-mavx512bf16")).run(tmp_path, MEMORY)


def test_attention_in_two_ubatches(tmp_path: Path) -> None:
    ATTENTION.run(tmp_path, THREADS, "ubatches")


@pytest.mark.parametrize("isa", [AVX2, AVX512_BF16], ids=["avx2", "avx512_bf16"])
def test_products(isa: list[str], tmp_path: Path) -> None:
    Program("products", (*PRODUCTS, "tests/exact_scratch.cpp"), tuple(isa)).run(tmp_path, HEAP)


@pytest.mark.parametrize("isa", ISAS.values(), ids=ISAS)
def test_products_of_integers(isa: list[str], tmp_path: Path) -> None:
    Program("int_products", (*PRODUCTS, "tests/exact_scratch.cpp"), tuple(isa)).run(tmp_path, HEAP)


def test_products_in_two_ubatches(tmp_path: Path) -> None:
    Program("products", (*PRODUCTS, "pool/scratch.cpp"), tuple(AVX2)).run(
        tmp_path, THREADS, "ubatches"
    )


@pytest.mark.skipif(
    not shutil.which(CROSS_COMPILER) or not shutil.which(EMULATOR),
    reason="needs an emulator of ARM",
)
@pytest.mark.parametrize(
    "name", ["rows", "attention", "recurrence", "scans", "products", "int_products"]
)
def test_kernels_on_arm(name: str, tmp_path: Path) -> None:
    others = {name: Program(name, sources) for name, sources in RECURRENT.items()}
    others |= {
        name: Program(name, (*PRODUCTS, "tests/exact_scratch.cpp"))
        for name in ("products", "int_products")
    }
    ({"rows": ROWS, "attention": ATTENTION} | others)[name].emulate(tmp_path)


@pytest.mark.skipif(not shutil.which(CROSS_COMPILER), reason="needs a compiler for ARM")
def test_all_kernels_compile_for_arm(tmp_path: Path) -> None:
    flags = ["-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized"]
    to = str(tmp_path / "kernels.o")
    subprocess.run(
        [CROSS_COMPILER, *COMMON, *flags, "-c", "csrc/kernels/isa_neon.cpp", "-o", to],
        cwd=ROOT,
        check=True,
    )


@pytest.mark.skipif(not X86, reason="needs a compiler for x86-64")
@pytest.mark.parametrize(("isa", "flags"), [("avx512", AVX512), ("avx512_bf16", AVX512_BF16)])
def test_what_this_cpu_may_lack_compiles_without_warnings(
    isa: str, flags: list[str], tmp_path: Path
) -> None:
    """GCC 12 warns of undefined operands in its own intrinsics."""
    strict = ["-Wall", "-Wextra", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    source = f"csrc/kernels/isa_{isa}.cpp"
    to = str(tmp_path / "kernels.o")
    subprocess.run(["g++", *COMMON, *flags, *strict, "-c", source, "-o", to], cwd=ROOT, check=True)
