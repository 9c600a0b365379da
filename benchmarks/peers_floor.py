"""The most tokens per second that this machine allows at this moment: every weight read once a step, every unit busy.

A decode step takes at least max(bytes / read rate, operations / dot rate), a prefill its operations / dot rate. Both
rates are measured by machine.cpp beside each case: on a shared machine they move.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """batch prompts of prompt_tokens each, new_tokens answers; one with a single new token measures the prefill."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def is_prefill(self) -> bool:
        return self.new_tokens == 1


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine's memory and cores deliver at this moment."""

    read_gb_s: float
    gflop_s: float


class Machine:
    """Measures the rates, about 0.3 s each time."""

    def __init__(self, program: Path, threads: int) -> None:
        self._command = [str(program), str(threads)]

    def rates(self) -> Rates:
        return Rates(**json.loads(subprocess.run(self._command, capture_output=True, check=True).stdout))


@contextmanager
def compiled_machine(threads: int) -> Iterator[Machine]:
    """machine.cpp, compiled for this processor by $CXX (default: c++)."""
    source = Path(__file__).with_name("machine.cpp")
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-") as folder:
        program = Path(folder, "machine")
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-O3", "-march=native", "-pthread", source, "-o", program], check=True)
        yield Machine(program, threads)


def floor_tokens_per_s(
    config: Mapping[str, Any], case: Case, rates: Rates, weight_bytes: float = 2, kv_bytes: float = 2
) -> float:
    """Tokens per second that `rates` allow, for a Hugging Face config of a model whose layers are all MoE layers.

    Experts are taken as chosen evenly: a step of `batch` tokens reads E (1 - (1 - k/E)^batch) of a layer's E experts.
    weight_bytes: of one parameter; kv_bytes: of one element of keys and values.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, layers, head_dim = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    experts, top_k = config.get("num_experts") or config["num_local_experts"], config["num_experts_per_tok"]
    attention = width * (2 * heads + 2 * kv_heads) * head_dim + width * experts  # the router among it
    expert = 3 * width * config["moe_intermediate_size"]
    lm_head = config["vocab_size"] * width
    multiplied: int = layers * (attention + top_k * expert)  # parameters per token
    attended: int = 4 * heads * head_dim * layers  # operations per token and token before it
    if case.is_prefill:
        flops: float = 2 * multiplied + attended * case.prompt_tokens / 2
        return 1e9 * rates.gflop_s / flops
    context = case.prompt_tokens + case.new_tokens / 2
    touched = experts * (1 - (1 - top_k / experts) ** case.batch)
    step_bytes: float = weight_bytes * (layers * (attention + touched * expert) + lm_head)
    step_bytes += case.batch * context * 2 * kv_bytes * kv_heads * head_dim * layers
    step_flops: float = case.batch * (2 * (multiplied + lm_head) + attended * context)
    return case.batch / max(step_bytes / (1e9 * rates.read_gb_s), step_flops / (1e9 * rates.gflop_s))
