"""The rules of MoE layers, from config.json to kernels: how a token chooses its experts, and what a
gated MLP computes.

The reference (ops/elementwise.py), native and Triton kernels take the same objects. No torch here.
"""

import math
from dataclasses import dataclass
from typing import Literal

from moeserve.errors import ConfigError

TILE = 16  # tokens between the borders at which recurrent layers keep states (ops/recurrence.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """The rule by which a token chooses its experts. Scores in fp32; ties go to the lowest expert
    id.

    score: `softmax` over all experts; `softmax_selected`, over the chosen logits alone (GraniteMoE,
    gpt-oss); `sigmoid` (DeepSeek-V3); `sparsemixer`: each choice is a softmax over the logits near
    it (Phi-3.5-MoE, Liu et al. 2024), and bias and groups play no part. bias: there is a bias per
    expert, which is added to scores for the choice, never to weights. groups, kept_groups: experts
    lie in so many groups of one size, of which only the best take part. group_score: a group's best
    score with its bias (DeepSeek-V2), or the sum of its best two (V3). renormalize: the chosen
    weights are divided by max(their sum + epsilon, floor). scale: multiplies the weights. on_input:
    the weight multiplies the expert's input instead of its output (Llama-4). fp32: the router's
    product runs in fp32, whatever the activations are. jitter: half the width of sparsemixer's
    band, relative to the logits.
    """

    score: Literal["softmax", "softmax_selected", "sigmoid", "sparsemixer"] = "softmax"
    bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    renormalize: bool = False
    epsilon: float = 0.0
    floor: float = 0.0
    scale: float = 1.0
    on_input: bool = False
    fp32: bool = False
    jitter: float = 0.0

    @property
    def num_group_scores(self) -> int:
        """The number of scores that make up a group's."""
        return 2 if self.group_score == "top2" else 1

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ConfigError where a token cannot choose `top_k` of `num_experts` experts by this
        rule.
        """
        groups = self.groups
        kept = self.kept_groups
        if not 1 <= kept <= groups or num_experts % groups:
            raise ConfigError(
                f"a router cannot keep {kept} of {groups} equal groups of {num_experts} experts"
            )
        if kept < groups and num_experts // groups < self.num_group_scores:
            raise ConfigError(
                f"groups of {num_experts // groups} experts have no best "
                f"{self.num_group_scores} scores"
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
    """The activation of an MLP, in fp32, rounded once where a kernel can: act(gate) * (up +
    up_shift), or act(up).

    kind: `silu`, gate * sigmoid(alpha * gate) (SwiGLU, Shazeer 2020), `gelu_tanh`, GELU by its tanh
    approximation, or, without gates, `relu2`, max(up, 0) ** 2 (Primer, So et al. 2021; Nemotron).
    limit: gate is at most, and up within plus or minus, this much (gpt-oss). limit_after: the limit
    is on act(gate) instead of on gate (Step-3.5).
    """

    kind: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    alpha: float = 1.0
    limit: float = math.inf
    limit_after: bool = False
    up_shift: float = 0.0

    @property
    def parts(self) -> int:
        """The products in front of the activation: gate and up, or up alone."""
        return 1 if self.kind == "relu2" else 2

    @property
    def plain(self) -> bool:
        """Whether this is silu(gate) * up, which kernels have a path of its own for."""
        return self == SWIGLU

    @property
    def gate_limit(self) -> float:
        """The largest gate."""
        return math.inf if self.limit_after else self.limit

    @property
    def act_limit(self) -> float:
        """The largest act(gate)."""
        return self.limit if self.limit_after else math.inf


SWIGLU = Activation()
RELU2 = Activation(kind="relu2")
