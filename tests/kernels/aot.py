"""Compile kernels for sm_90 without a GPU, and report facts that an interpreter cannot tell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """One way to compile a kernel.

    `kernel` is a name such as "activation:act_mul_kernel" in moeserve.kernels. `signature` has the
    type of each argument that is not a constant: "*bf16" for a pointer, "i32", "fp32", ...
    `constants` has the others. `aligned` names integers that are multiples of 16; pointers always
    are.
    """

    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    aligned: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3


def sorted_before(case: Case) -> Case:
    """Return the same product over rows that are in order already.

    A dispatch has grouped them or put them into slots.
    """
    signature = {name: kind for name, kind in case.signature.items() if name != "order_ptr"}
    return replace(case, signature=signature, constants={**case.constants, "order_ptr": None})


@dataclass(frozen=True)
class Report:
    """Facts about a compiled kernel."""

    registers: int  # per thread
    stack_bytes: int  # spilled, per thread
    shared_bytes: int  # per program
    wgmma: bool  # whether products run on tensor cores by Hopper's instruction
    mma: bool  # whether they do by the older one
    tma: bool  # whether tiles are loaded by bulk copies
    accesses: list[str]  # kinds of instructions that read and write global memory


def compile_all(cases: Sequence[Case]) -> list[Report]:
    """Compile in a process of its own, in which triton does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    asked = json.dumps([asdict(case) for case in cases])
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.aot"]
    done = subprocess.run(
        command,
        input=asked,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Report(**report) for report in json.loads(done.stdout)]


def _compile(case: Case) -> Report:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = case.kernel.split(":")
    kernel = getattr(importlib.import_module(f"moeserve.kernels.{module}"), name)
    unknown = {*case.signature, *case.constants} ^ set(kernel.arg_names)
    assert not unknown, f"{case.kernel}: {sorted(unknown)} are missing or unknown"
    types = {arg: case.signature.get(arg, "constexpr") for arg in kernel.arg_names}
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(kernel.arg_names)
        if types[arg].startswith("*") or arg in case.aligned
    }
    # JSON has lists in place of tuples.
    constants = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in case.constants.items()
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=hints)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, stack = _resources(compiled.asm["cubin"])
    return Report(
        registers=registers,
        stack_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        wgmma="wgmma.mma_async" in ptx,
        mma="mma.sync" in ptx,
        tma="cp.async.bulk" in ptx,
        accesses=sorted(set(re.findall(r"(?:ld|st|atom|red)\.[\w.]*global[\w.]*", ptx))),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes per thread, read by triton's disassembler."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    words = dict(word.split(":", 1) for word in text.split() if word.count(":") == 1)
    return int(words["REG"]), int(words["STACK"])


if __name__ == "__main__":
    json.dump([asdict(_compile(Case(**asked))) for asked in json.load(sys.stdin)], sys.stdout)
