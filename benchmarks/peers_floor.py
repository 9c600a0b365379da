"""The floor: the most tokens per second that this machine's memory and cores allow.

A decode step takes at least bytes / read rate or operations / FLOP rate, whichever is longer,
because it reads every weight once; a prefill takes the latter. machine.cpp measures both rates
beside each case, because they change on a shared machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from statistics import mean

from benchmarks.common import AT_MOST_AVX2
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.mixer import Mixer
from moeserve.models.spec import ModelSpec, model_size


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of `batch` prompts of prompt_tokens each with new_tokens answers.

    With one new token it measures the prefill.
    """

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def is_prefill(self) -> bool:
        return self.new_tokens == 1


@dataclass(frozen=True, slots=True)
class Rates:
    """The current rates of the machine's memory and cores."""

    read_gb_s: float
    gflop_s: float


class Machine:
    """Measures the rates, in about 0.3 s."""

    def __init__(self, program: Path, threads: int) -> None:
        self._command = [str(program), str(threads)]

    def rates(self) -> Rates:
        return Rates(
            **json.loads(subprocess.run(self._command, capture_output=True, check=True).stdout)
        )


@contextmanager
def compiled_machine(threads: int) -> Iterator[Machine]:
    """Compile machine.cpp by $CXX (default: c++) for the instructions that kernels may use."""
    source = Path(__file__).with_name("machine.cpp")
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-") as folder:
        program = Path(folder, "machine")
        compiler = os.environ.get("CXX", "c++")
        march = "x86-64-v3" if AT_MOST_AVX2 else "native"
        subprocess.run(
            [compiler, "-O3", f"-march={march}", "-pthread", source, "-o", program], check=True
        )
        yield Machine(program, threads)


def floor_tokens_per_s(
    spec: ModelSpec, case: Case, rates: Rates, weight_bytes: float = 2, kv_bytes: float = 2
) -> float:
    """Return the tokens per second that `rates` allow for a model.

    weight_bytes are those of a parameter, and kv_bytes those of an element of the KV cache. Routing
    is taken to be even: a step of `batch` tokens reads E (1 - (1 - k/E)^batch) of a layer's E
    experts. Not counted are operations of recurrences and of index selectors, and writing states.
    """
    size = model_size(spec)
    head = spec.vocab_size * spec.hidden_size
    layers = [layer.mixer for layer in spec.layers]
    if case.is_prefill:
        positions = range(case.prompt_tokens)
        pairs = [mean(attended_to(mixer, position) for position in positions) for mixer in layers]
        attended: float = sum(map(mul, map(prefill_operations, layers), pairs))
        return 1e9 * rates.gflop_s / (2 * (size.active - head) + attended)
    position = case.prompt_tokens + case.new_tokens // 2
    pairs = [attended_to(mixer, position) for mixer in layers]
    touched = spec.num_experts * (
        1 - (1 - spec.experts_per_token / max(spec.num_experts, 1)) ** case.batch
    )
    experts = (touched - spec.experts_per_token) * len(spec.moe_layers) * spec.expert_weights
    step_bytes: float = weight_bytes * (size.active + experts)
    step_bytes += case.batch * sum(cache_bytes(mixer, position, kv_bytes) for mixer in layers)
    step_flops: float = case.batch * (
        2 * size.active + sum(map(mul, map(decode_operations, layers), pairs))
    )
    return case.batch / max(
        step_bytes / (1e9 * rates.read_gb_s), step_flops / (1e9 * rates.gflop_s)
    )


def seen(mixer: Mixer, position: int) -> int:
    """Return the number of tokens that the query at `position` may attend to."""
    return position + 1 - int(mixer.rule.first_live(position))


def attended_to(mixer: Mixer, position: int) -> int:
    """Return the number of tokens that the query at `position` attends to.

    With an index selector these are some of those that it may attend to.
    """
    indexer = mixer.indexer if isinstance(mixer, LatentAttention) else None
    return min(seen(mixer, position), indexer.top_k) if indexer else seen(mixer, position)


def cache_bytes(mixer: Mixer, position: int, kv_bytes: float) -> float:
    """Return the bytes of a layer's cache that a decode step must read.

    For recurrent layers this is one fp32 state.
    """
    tensors = mixer.cache(1)
    if mixer.rule.tile:
        return 4 * sum(tensor.heads * tensor.width for tensor in tensors if tensor.per_tile)
    chosen = attended_to(mixer, position)
    of_index = seen(mixer, position)
    tokens = [of_index if tensor.name == "index" else chosen for tensor in tensors]
    return kv_bytes * sum(
        count * tensor.heads * tensor.width for count, tensor in zip(tokens, tensors, strict=True)
    )


def decode_operations(mixer: Mixer) -> int:
    """Return the operations of all heads per pair of query and attended token."""
    heads = mixer.head_shape(1)
    return 2 * heads.num_heads * (heads.dim + heads.v_dim) if heads else 0


def prefill_operations(mixer: Mixer) -> int:
    """Return the same for prefill.

    Latents are expanded to keys and values once for all queries, so the absorbed weights do not
    count.
    """
    if isinstance(mixer, LatentAttention):
        return 2 * mixer.num_heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
    return decode_operations(mixer)
