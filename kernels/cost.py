"""Predict the time of a compiled GEMM kernel on a GPU, to choose launch parameters to try.

The prediction only ranks configurations; `python -m benchmarks.cost` measures how well.

For each step of the innermost loop, `parse_facts` reads from the machine code:

- tensor-core cycles. A warpgroup's 64 x N x 16 product takes N / 2 cycles, and at least 16 + N / 4
  to read both operands from shared memory at 128 bytes per cycle.
- issue cycles. A multiprocessor issues four instructions per cycle, but only one memory access, and
  half an exponential.

`seconds` predicts a launch:

1. A program alone takes `steps * max(chain, latency / loads in flight) + PROLOGUE_CYCLES` cycles,
   where `chain` is its own sequence of instructions.
2. Programs that are resident on one multiprocessor (limited by registers, shared memory and
   threads) share its tensor cores, issue slots and L2 bandwidth. A wave of programs takes the
   longer of 1. and 2. The last wave has only the programs that are left.
3. Each tile is read from DRAM once, or again if it does not stay in L2 until its next use.
4. A launch takes the longer of computing and DRAM traffic, plus a tenth of the shorter.

Sources: peaks and limits are from NVIDIA's data sheets and the CUDA programming guide (compute
capability 9.0), products from shared memory from Luo et al. (arXiv 2402.13499). DRAM_SHARE and
TENSOR_SHARE are from large copies and products measured on an H200 (4.3 of 4.8 TB/s, 790 of 989
TFLOP/s). LOAD_LATENCY_CYCLES, PROLOGUE_CYCLES, MMA_SHARE and SPILL_CYCLES are guesses.
L2_BYTES_PER_CYCLE was fitted to measurements of large products.
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

# Limits of one multiprocessor.
MAX_REGISTERS = 65_536
MAX_SHARED_BYTES = 233_472
MAX_WARPS = 64
MAX_PROGRAMS = 32
# Limits of one program
MAX_PROGRAM_SHARED_BYTES = 232_448
RESERVED_SHARED_BYTES = 1024  # that the system uses
LOAD_LATENCY_CYCLES = 1200.0
PROLOGUE_CYCLES = 3000.0  # of a program, outside of its loop
L2_BYTES_PER_CYCLE = 32.0  # bandwidth per multiprocessor
LAUNCH_S = 2e-6
# Shares of the peak that kernels reach.
DRAM_SHARE = 0.9
TENSOR_SHARE = 0.8
MMA_SHARE = 0.6  # with mma.sync, the older tensor-core instruction (HMMA)
SPILL_CYCLES = 4.0  # to issue a spill or reload; the tensor cores wait meanwhile


@dataclass(frozen=True, slots=True)
class Card:
    """The data of one GPU model."""

    multiprocessors: int
    bytes_per_s: float  # of DRAM
    clock_hz: float
    l2_bytes: float


# Bandwidths are as in moeserve/plan/hardware.py, which must work without Triton.
CARDS: Mapping[str, Card] = {
    "NVIDIA H100 80GB HBM3": Card(
        multiprocessors=132, bytes_per_s=3.35e12, clock_hz=1.83e9, l2_bytes=50e6
    ),
    "NVIDIA H200": Card(multiprocessors=132, bytes_per_s=4.8e12, clock_hz=1.83e9, l2_bytes=50e6),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """A compiled kernel. Cycles are per step of the innermost loop."""

    registers: int  # per thread
    stack_bytes: int  # spilled registers per thread
    shared_bytes: int
    warps: int
    tensor_cycles: float  # of the tensor cores, which one program uses on its multiprocessor
    issue_cycles: float  # which one program uses on its multiprocessor
    chain_cycles: float  # which one program takes when it is alone


@dataclass(frozen=True, slots=True)
class Product:
    """The sizes of one launch. With several experts, rows are routed at random."""

    rows: int  # of all experts together
    experts: int
    width: int  # outputs of each matrix
    inner: int  # inputs
    depth: int  # inputs of one step
    matrices: int  # 2 for gate and up, otherwise 1
    weight_bytes: float  # per weight
    row_bytes: float  # per activation element

    @property
    def num_busy_experts(self) -> float:
        """The expected number of experts with rows. 128 rows, 128 experts -> 80.9"""
        return -self.experts * math.expm1(-self.rows / self.experts) if self.experts > 1 else 1.0

    def tiles(self, block_m: int) -> float:
        """Return the expected number of tiles.

        An expert has a tile for every multiple of `block_m` (0 included) that its rows exceed.
        """
        if self.experts == 1:
            return math.ceil(self.rows / block_m)
        mean = self.rows / self.experts
        starts = range(block_m, int(mean + 8 * math.sqrt(mean)) + block_m, block_m)
        more = sum(math.erfc((start + 0.5 - mean) / math.sqrt(2 * mean)) for start in starts)
        return self.num_busy_experts + self.experts * more / 2


def parse_facts(text: str, shared_bytes: int, warps: int) -> Facts:
    """Read the facts of a kernel from the output of cuobjdump.

    Cycles are counted in the loop with the most tensor-core instructions, or over all instructions
    if there is no loop.
    """
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*) ?(.*?) *;", text)
    loops = [list(range(len(code)))]
    places = {int(address, 16): index for index, (address, _, _) in enumerate(code)}
    for index, (_, name, operands) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        if target and places.get(int(target[1], 16), index) < index:
            loops.append(list(range(places[int(target[1], 16)], index + 1)))
    tensor_cycles = [_tensor_cycles(name, operands) for _, name, operands in code]
    loop = max(
        loops[1:] or loops, key=lambda body: (sum(tensor_cycles[i] > 0 for i in body), -len(body))
    )
    names = [code[i][1] for i in loop]
    num_memory = sum(name.startswith(("LD", "ST", "RED", "ATOM")) for name in names)
    num_spills = sum(name.startswith(("LDL", "STL")) for name in names)
    num_functions = sum(name.startswith("MUFU") for name in names)
    issue_cycles = warps * max(
        (len(names) - num_memory) / 4 + num_memory + (SPILL_CYCLES - 1) * num_spills,
        2 * num_functions,
    )
    own_cycles = warps / 4 * sum(tensor_cycles[i] for i in loop) + (
        issue_cycles if num_spills else 0
    )
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, text[:400]
    return Facts(
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        shared_bytes=shared_bytes,
        warps=warps,
        tensor_cycles=own_cycles,
        issue_cycles=issue_cycles,
        chain_cycles=2 * len(names) + own_cycles,
    )


def _tensor_cycles(name: str, operands: str) -> float:
    """Return the tensor-core cycles of an instruction of four warps, 0 for other instructions."""
    if product := re.match(r"[HQI]GMMA\.64x(\d+)x", name):
        columns = int(product[1])
        # The weights are read from shared memory, unless they are in registers.
        weights = 16 if operands.split(", ")[1].startswith("gdesc") else 0
        return max(columns / 2 / TENSOR_SHARE, columns / 4 + weights)
    return 4 / MMA_SHARE if name.startswith("HMMA.16816") else 0.0


def occupancy(facts: Facts) -> int:
    """Return how many programs fit on a multiprocessor, 0 if not even one does.

    128 registers, 4 warps, 60,000 bytes -> 3
    """
    registers = math.ceil(facts.registers * 32 / 256) * 256 * facts.warps
    if facts.shared_bytes > MAX_PROGRAM_SHARED_BYTES or registers > MAX_REGISTERS:
        return 0
    return min(
        MAX_REGISTERS // registers,
        MAX_SHARED_BYTES // (facts.shared_bytes + RESERVED_SHARED_BYTES),
        MAX_WARPS // facts.warps,
        MAX_PROGRAMS,
    )


def seconds(facts: Facts, product: Product, card: Card, config: Mapping[str, int]) -> float:
    """Return the predicted time of a launch; infinity if it cannot run.

    config: block_m, block_n, stages and group.
    """
    resident = occupancy(facts)
    if not resident:
        return math.inf
    block_m = config["block_m"]
    block_n = config["block_n"]
    tiles = product.tiles(block_m)
    blocks = math.ceil(product.width / block_n)
    steps = math.ceil(product.inner / product.depth)
    weight_bytes = product.matrices * block_n * product.depth * product.weight_bytes
    load_cycles = (
        weight_bytes + min(block_m, product.rows) * product.depth * product.row_bytes
    ) / L2_BYTES_PER_CYCLE
    wait_cycles = LOAD_LATENCY_CYCLES / max(1, config["stages"] - 1)
    programs_each = tiles * blocks / card.multiprocessors  # of one multiprocessor
    waves, rest = divmod(programs_each, resident)
    cycles = waves * wave_cycles(facts, resident, steps, load_cycles, wait_cycles)
    if rest:
        cycles += wave_cycles(facts, math.ceil(rest), steps, load_cycles, wait_cycles)
    # Programs that run at the same time
    together = card.multiprocessors * min(resident, math.ceil(programs_each))
    # DRAM traffic: an expert's weights are read once for all of its tiles that run at the same
    # time, and rows once for all blocks. If L2 keeps them, both are read only once.
    experts = product.num_busy_experts
    group = config["group"]
    l2_share = card.l2_bytes / 2
    tiles_together = max(min(group, tiles / experts), together / blocks)
    expert_bytes = product.matrices * product.width * product.inner * product.weight_bytes
    weight_reads = 1.0
    if expert_bytes > l2_share:
        weight_reads = max(1.0, tiles / experts / tiles_together)
    row_bytes = product.inner * product.row_bytes
    row_reads = 1.0
    if min(group, tiles) * block_m * row_bytes > l2_share:
        row_reads = max(1.0, blocks * tiles_together / together)
    out_bytes = product.width * product.row_bytes
    num_bytes = experts * expert_bytes * weight_reads
    num_bytes += product.rows * (row_bytes * row_reads + out_bytes)
    return launch_s(cycles, num_bytes, card)


def wave_cycles(
    facts: Facts, number: int, steps: float, load_cycles: float, wait_cycles: float
) -> float:
    """Return the cycles of one wave with `number` programs on each multiprocessor.

    steps: of each program.
    load_cycles: of L2 bandwidth that a step uses.
    wait_cycles: that a program alone waits for the loads of a step.
    """
    return max(
        steps * max(facts.chain_cycles, wait_cycles) + PROLOGUE_CYCLES,
        number * steps * max(facts.tensor_cycles, facts.issue_cycles, load_cycles)
        + PROLOGUE_CYCLES / number,
    )


def launch_s(cycles: float, num_bytes: float, card: Card) -> float:
    """Return the seconds of a launch. num_bytes: DRAM traffic."""
    both = cycles / card.clock_hz, num_bytes / card.bytes_per_s / DRAM_SHARE
    return max(both) + 0.1 * min(both) + LAUNCH_S


_compiled: list[Any] = []


def compile_only() -> None:
    """Make kernel calls in this process compile for Hopper and launch nothing.

    The compiled kernels get the same keys in Triton's cache as launches would. Tensors may be on
    the meta device.
    """
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
    """Yield facts about the last `count` kernels that `call` launches, after `compile_only`.

    They are read with the disassembler that Triton ships.
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
