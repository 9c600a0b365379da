"""The rules of MoE layers: how a router chooses experts, and which activation an MLP has.

The reference (ops/elementwise.py), native and Triton kernels take the same objects. Does not import
torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

from moeserve.errors import ConfigError

TILE = 16  # tokens between two cached states of a recurrent layer (ops/recurrence.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """The rule by which a router chooses experts. Scores are fp32; ties go to the lowest id."""

    # softmax: over all experts
    # softmax_selected: over the logits of the chosen experts (GraniteMoE, gpt-oss)
    # sigmoid: DeepSeek-V3
    # sigmoid_selected: the choice is by logits, bias included; weights are sigmoids of the chosen
    #     experts' logits (Kolibri)
    # sqrt_softplus: the square root of log(1 + e^logit) (DeepSeek-V4)
    # sparsemixer: each choice is a softmax over the logits near it (Phi-3.5-MoE, Liu et al. 2024);
    #     bias and groups are not used
    score: Literal[
        "softmax",
        "softmax_selected",
        "sigmoid",
        "sigmoid_selected",
        "sqrt_softplus",
        "sparsemixer",
    ] = "softmax"
    bias: bool = False  # a bias per expert on scores, for the choice only, not for weights
    # Experts are in groups of equal size, and only the `kept_groups` best groups take part.
    groups: int = 1
    kept_groups: int = 1
    # The score of a group: its best score, bias included (DeepSeek-V2), or the sum of its best two
    # (V3)
    group_score: Literal["max", "top2"] = "top2"
    renormalize: bool = False  # divide the weights by max(their sum + epsilon, floor)
    epsilon: float = 0.0
    floor: float = 0.0
    scale: float = 1.0  # factor of the weights
    on_input: bool = False  # weights multiply the input of an expert, not its output (Llama-4)
    fp32: bool = False  # the router's product runs in fp32, whatever the dtype of activations
    jitter: float = 0.0  # half the width of sparsemixer's band, relative to the logits

    @property
    def num_group_scores(self) -> int:
        """The number of experts' scores that a group's score is the sum of."""
        return 2 if self.group_score == "top2" else 1

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise ConfigError if this rule cannot choose `top_k` of `num_experts` experts."""
        groups = self.groups
        kept = self.kept_groups
        if not 1 <= kept <= groups or num_experts % groups:
            raise ConfigError(
                f"a router cannot keep {kept} of {groups} equal groups of {num_experts} experts"
            )
        if kept < groups and num_experts // groups < self.num_group_scores:
            raise ConfigError(
                f"groups of {num_experts // groups} experts are too small for a group score of "
                f"the best {self.num_group_scores}"
            )
        if not 1 <= top_k <= num_experts // groups * kept:
            raise ConfigError(
                f"a router cannot choose {top_k} experts: {kept} of {groups} groups of "
                f"{num_experts} remain"
            )
        if self.on_input and top_k != 1:
            raise ConfigError(
                f"weights can multiply the input of one expert per token, not of {top_k}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The activation of an MLP: act(gate) * (up + up_shift), or act(up) without gates.

    Computed in fp32, and rounded once if the kernel can.
    """

    # silu: gate * sigmoid(alpha * gate) (SwiGLU, Shazeer 2020)
    # gelu_tanh: GELU in its tanh approximation
    # relu2: max(up, 0) ** 2, without gates (Primer, So et al. 2021; Nemotron)
    kind: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    alpha: float = 1.0
    limit: float = math.inf  # upper bound of gate, and bound of the magnitude of up (gpt-oss)
    limit_after: bool = False  # the upper bound applies to act(gate), not to gate (Step-3.5)
    up_shift: float = 0.0
    # Linear factors become cap * tanh(x / cap): up, and gate outside of its sigmoid (Inkling 2).
    # 0: unchanged. Native and Triton kernels do not support it.
    gate_cap: float = 0.0
    up_cap: float = 0.0

    @property
    def capped(self) -> bool:
        """Whether gate and up are capped."""
        return self.gate_cap > 0

    @property
    def parts(self) -> int:
        """The number of products before the activation: 2 (gate and up) or 1 (up)."""
        return 1 if self.kind == "relu2" else 2

    @property
    def plain(self) -> bool:
        """Whether this is silu(gate) * up, for which kernels have a fast path."""
        return self == SWIGLU

    @property
    def gate_limit(self) -> float:
        """The upper bound of gate."""
        return math.inf if self.limit_after else self.limit

    @property
    def act_limit(self) -> float:
        """The upper bound of act(gate)."""
        return self.limit if self.limit_after else math.inf


SWIGLU = Activation()
RELU2 = Activation(kind="relu2")
