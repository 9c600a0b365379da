"""The expert kernels by name. Packages add theirs by entry points of "moeserve.expert_kernels".

An entry is a callable that takes `ExpertFacts` and returns `Experts`. A plugin's kernel is chosen
by name with the setting `kernels`; all other kernels are then those of `kernels: auto`. This module
does not import torch, because settings are checked without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.plugins import Registry

if TYPE_CHECKING:
    from moeserve.moe.experts.base import Experts
    from moeserve.ops.table import Ops

# Values of the setting `kernels` that choose the kernels of all operations, not of experts alone
SETTINGS = ("auto", "native", "torch", "triton", "deep_gemm", "flashinfer")
PACKAGES = ("deep_gemm", "flashinfer")  # packages whose experts are used with Triton's kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """The facts for which an expert kernel is made."""

    ops: "Ops"
    experts_per_rank: int
    hidden_size: int
    expert_size: int
    swiglu: bool  # all layers' experts have the activation SwiGLU
    capped: bool = False  # the activation of a layer's experts has caps
    fp8_blocks: bool  # the checkpoint has e4m3 weights with scales per block of 128 x 128

    @property
    def is_package_chosen(self) -> bool:
        """Whether the user chose another package's kernels for experts."""
        return self.ops.kernels_setting in PACKAGES

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(experts of a rank, an expert's inner width, the model's width), as kernels expect it."""
        return self.experts_per_rank, self.expert_size, self.hidden_size


EXPERT_KERNELS: "Registry[Callable[[ExpertFacts], Experts]]" = Registry(
    "moeserve.expert_kernels",
    {
        "native": "moeserve.moe.experts.native:make",
        "triton": "moeserve.moe.experts.triton:make",
        "deep_gemm": "moeserve.moe.experts.triton:make_deep_gemm",
        "flashinfer": "moeserve.moe.experts.triton:make_flashinfer",
        "grouped_mm": "moeserve.moe.experts.reference:make_grouped_mm",
        "reference": "moeserve.moe.experts.reference:make",
    },
    reserved=SETTINGS,
)


def make_kernels(facts: ExpertFacts) -> "list[Experts]":
    """Return the kernels that `plan_moe` may choose from, best first."""
    return [EXPERT_KERNELS[name](facts) for name in _offered(facts)]


def _offered(facts: ExpertFacts) -> tuple[str, ...]:
    ops = facts.ops
    if ops.kernels_setting in EXPERT_KERNELS.plugins:
        return (ops.kernels_setting,)
    plain = ("grouped_mm", "reference")
    if ops.native and not facts.capped:
        return ("native", *plain)
    if not ops.triton:
        return plain
    if facts.is_package_chosen:
        return (ops.kernels_setting,)
    package = "deep_gemm" if facts.fp8_blocks else "flashinfer"
    return (package, "triton", *(() if ops.exact else plain))


def check_kernels(name: str) -> None:
    """Raise ConfigError unless `name` is a value of the setting `kernels`."""
    EXPERT_KERNELS.check(name, "kernels", SETTINGS)
