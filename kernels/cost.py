"""A model of how long a kernel of products takes on a card, from its compiled form: which launch
parameters to try.

For each step of its innermost loop, from the machine code: cycles of the tensor cores (a
warpgroup's 64 x N x 16 product takes N / 2, and 16 + N / 4 to read both sides from shared memory at
128 bytes a cycle), cycles to issue (four instructions a cycle, one to memory, half an exponential),
and bytes from L2. One program takes `steps * max(its own chain of instructions, a load's latency /
the loads on their way) + PROLOGUE`; those that a multiprocessor holds at once (by registers, shared
memory and threads) share what it has, so a round takes the longer of both, the last round as many
as are left. Beside that the card reads each tile of DRAM once, or again where it does not stay in
L2 until it is used again. A launch takes the longer of both, and a tenth of the shorter.

Sources: peaks and limits, NVIDIA's data sheets and the CUDA programming guide (compute capability
9.0); products from shared memory, Luo et al., arXiv 2402.13499; shares of the peaks, large copies
and products on an H200 (4.3 of 4.8 TB/s, 790 of 989 TFLOP/s). LATENCY, PROLOGUE, MMA_SHARE and
SPILL are guesses; L2_BYTES is what made large products like measured ones. It orders
configurations, and is no measurement: `python -m benchmarks.cost` says how well.
"""

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

# of a multiprocessor
REGISTERS = 65_536
SHARED = 233_472
WARPS = 64
PROGRAMS = 32
# of a program
MOST_SHARED = 232_448
RESERVED = 1024
# cycles, cycles, bytes a cycle for each multiprocessor
LATENCY = 1200.0
PROLOGUE = 3000.0
L2_BYTES = 32.0
LAUNCH_S = 2e-6
DRAM_SHARE = 0.9
TENSOR_SHARE = 0.8
MMA_SHARE = 0.6  # of the older instruction for tensor cores
SPILL = 4.0  # cycles to issue; and the tensor cores wait for what spilled


@dataclass(frozen=True, slots=True)
class Card:
    """multiprocessors, DRAM bandwidth, clock and L2."""

    multiprocessors: int
    bytes_per_s: float
    clock_hz: float
    l2_bytes: float


CARDS: Mapping[
    str, Card
] = {  # bandwidths as in moeserve/plan/hardware.py, which works without Triton
    "NVIDIA H100 80GB HBM3": Card(132, 3.35e12, 1.83e9, 50e6),
    "NVIDIA H200": Card(132, 4.8e12, 1.83e9, 50e6),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """A compiled kernel. registers, stack_bytes (spills): of a thread. tensor, issue: cycles of a
    multiprocessor for a step of one program; chain: those that one program takes by itself."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    tensor: float
    issue: float
    chain: float


@dataclass(frozen=True, slots=True)
class Product:
    """One launch. rows: of all experts, which choose at random if there are several. width: outputs
    of each of its matrices; inner: inputs, `depth` in a step. weight_bytes, row_bytes: of an
    element."""

    rows: int
    experts: int
    width: int
    inner: int
    depth: int
    matrices: int
    weight_bytes: float
    row_bytes: float

    @property
    def busy(self) -> float:
        """The expected number of experts that have rows. 128 rows, 128 experts -> 80.9"""
        return -self.experts * math.expm1(-self.rows / self.experts) if self.experts > 1 else 1.0

    def tiles(self, block_m: int) -> float:
        """The expected number of tiles: each expert has one for every multiple of block_m that its
        rows exceed.
        """
        if self.experts == 1:
            return math.ceil(self.rows / block_m)
        mean = self.rows / self.experts
        starts = range(block_m, int(mean + 8 * math.sqrt(mean)) + block_m, block_m)
        more = sum(math.erfc((start + 0.5 - mean) / math.sqrt(2 * mean)) for start in starts)
        return self.busy + self.experts * more / 2


def parse_facts(text: str, shared_bytes: int, warps: int) -> Facts:
    """The facts of cuobjdump's text: of the loop with most products, or of all instructions if
    there is no loop.
    """
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*) ?(.*?) *;", text)
    loops = [list(range(len(code)))]
    places = {int(at, 16): index for index, (at, _, _) in enumerate(code)}
    for index, (_, name, words) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", words) if name.startswith("BRA") else None
        if target and places.get(int(target[1], 16), index) < index:
            loops.append(list(range(places[int(target[1], 16)], index + 1)))
    tensor = [_tensor_cycles(name, words) for _, name, words in code]
    loop = max(loops[1:] or loops, key=lambda body: (sum(tensor[i] > 0 for i in body), -len(body)))
    names = [code[i][1] for i in loop]
    memory = sum(name.startswith(("LD", "ST", "RED", "ATOM")) for name in names)
    spills = sum(name.startswith(("LDL", "STL")) for name in names)
    functions = sum(name.startswith("MUFU") for name in names)
    issue = warps * max((len(names) - memory) / 4 + memory + (SPILL - 1) * spills, 2 * functions)
    own = warps / 4 * sum(tensor[i] for i in loop) + (issue if spills else 0)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text[:400]
    return Facts(
        int(found[1]), int(found[2]), shared_bytes, warps, own, issue, 2 * len(names) + own
    )


def _tensor_cycles(name: str, words: str) -> float:
    """Cycles of the tensor cores for an instruction of four warps; 0 for others."""
    if found := re.match(r"[HQI]GMMA\.64x(\d+)x", name):
        # else in registers
        columns = int(found[1])
        weights = 16 if words.split(", ")[1].startswith("gdesc") else 0
        return max(columns / 2 / TENSOR_SHARE, columns / 4 + weights)
    return 4 / MMA_SHARE if name.startswith("HMMA.16816") else 0.0


def occupancy(facts: Facts) -> int:
    """Return the number of programs on a multiprocessor; 0 if one does not fit.

    128 registers, 4 warps, 60,000 bytes -> 3
    """
    registers = math.ceil(facts.registers * 32 / 256) * 256 * facts.warps
    if facts.shared_bytes > MOST_SHARED or registers > REGISTERS:
        return 0
    return min(
        REGISTERS // registers,
        SHARED // (facts.shared_bytes + RESERVED),
        WARPS // facts.warps,
        PROGRAMS,
    )


def seconds(facts: Facts, product: Product, card: Card, config: Mapping[str, int]) -> float:
    """Return the predicted time of a launch; infinity if it cannot run. config: block_m, block_n,
    stages and group.
    """
    resident = occupancy(facts)
    if not resident:
        return math.inf
    block_m = config["block_m"]
    block_n = config["block_n"]
    tiles = product.tiles(block_m)
    blocks = math.ceil(product.width / block_n)
    steps = math.ceil(product.inner / product.depth)
    weights = product.matrices * block_n * product.depth * product.weight_bytes
    loaded = (weights + min(block_m, product.rows) * product.depth * product.row_bytes) / L2_BYTES
    each = tiles * blocks / card.multiprocessors
    step = (steps, loaded, LATENCY / max(1, config["stages"] - 1))
    full, rest = divmod(each, resident)
    cycles = full * round_cycles(facts, resident, *step) + (
        round_cycles(facts, math.ceil(rest), *step) if rest else 0
    )
    together = card.multiprocessors * min(resident, math.ceil(each))
    # From DRAM: an expert's weights for all of its tiles that run together, rows for all blocks;
    # once if L2 keeps them.
    experts = product.busy
    group = config["group"]
    kept = card.l2_bytes / 2
    beside = max(min(group, tiles / experts), together / blocks)
    expert = product.matrices * product.width * product.inner * product.weight_bytes
    again = max(1.0, tiles / experts / beside) if expert > kept else 1.0
    row = product.inner * product.row_bytes
    passes = (
        max(1.0, blocks * beside / together) if min(group, tiles) * block_m * row > kept else 1.0
    )
    num_bytes = experts * expert * again + product.rows * (
        row * passes + product.width * product.row_bytes
    )
    return launch_s(cycles, num_bytes, card)


def round_cycles(facts: Facts, number: int, steps: float, loaded: float, wait: float) -> float:
    """Cycles of so many programs on each multiprocessor. A step loads for `loaded`, and waits for
    `wait` if alone.
    """
    return max(
        steps * max(facts.chain, wait) + PROLOGUE,
        number * steps * max(facts.tensor, facts.issue, loaded) + PROLOGUE / number,
    )


def launch_s(cycles: float, num_bytes: float, card: Card) -> float:
    """Seconds of a launch whose programs take so many cycles, and whose bytes come from DRAM or go
    there.
    """
    both = cycles / card.clock_hz, num_bytes / card.bytes_per_s / DRAM_SHARE
    return max(both) + 0.1 * min(both) + LAUNCH_S


_compiled: list[Any] = []


def compile_only() -> None:
    """From now on, calls of kernels in this process compile for Hopper as a launch would, with the
    same key in Triton's cache, and launch nothing. Tensors may be of the device meta."""
    run = triton.JITFunction.run

    def compiled(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        _compiled.append(run(kernel, *args, warmup=True, **options))

    triton.JITFunction.run = compiled
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=int, get_current_stream=int
        )
    )


def compiled_by(call: Callable[[], object], count: int) -> Iterator[Facts]:
    """Yield facts about the last kernels that a call launches, after `compile_only`, by Triton's
    disassembler.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    _compiled.clear()
    call()
    for kernel in _compiled[-count:]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [str(tool), "-res-usage", "-sass", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        yield parse_facts(text, kernel.metadata.shared, kernel.metadata.num_warps)
