"""The router, which chooses each token's experts and their weights.

T: tokens. E: experts. K: experts per token. D: model width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.ops.inputs import RowContext
from moeserve.ops.linear import LinearMethod
from moeserve.ops.rules import RouterRule
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's choice for each token."""

    ids_TK: Tensor  # experts, best first, int32; -1 for padding
    weights_TK: Tensor  # factors of the experts' results, fp32

    def rows(self, rows: slice) -> "Routing":
        """Return the routing of a range of tokens, as views."""
        return Routing(self.ids_TK[rows], self.weights_TK[rows])

    def on_input(self, x_TD: Tensor) -> "tuple[Tensor, Routing]":
        """Apply the weights to the experts' inputs: return (x * weights, routing with weights 1).

        Tokens must have one expert each.
        """
        assert self.weights_TK.shape[1] == 1, self.weights_TK.shape
        weighted_TD = (x_TD * self.weights_TK).to(x_TD.dtype)
        return weighted_TD, Routing(self.ids_TK, torch.ones_like(self.weights_TK))


@dataclass(frozen=True, slots=True)
class Router:
    """Scores all experts with one matrix product, and keeps the best `top_k`."""

    gate: LinearMethod  # [E, D]; its weight is fp32 if `rule.fp32`
    top_k: int
    rule: RouterRule
    ops: Ops
    bias_E: Tensor | None = None  # fp32; see `Ops.route`
    expert_scale_E: Tensor | None = None  # fp32; see `Ops.route`

    def __post_init__(self) -> None:
        assert self.rule.bias == (self.bias_E is not None), self.rule
        assert self.top_k == 1 or not self.rule.on_input, self.top_k

    def __call__(self, x_TD: Tensor, context: RowContext) -> Routing:
        """Choose experts for each token. Padding gets none."""
        num_tokens = context.num_tokens
        logits_TE = self.gate(x_TD.float() if self.rule.fp32 else x_TD, context)
        arguments = (logits_TE, self.top_k, self.rule, self.bias_E, self.expert_scale_E)
        if isinstance(num_tokens, Tensor):  # only the device knows where padding begins
            return Routing(*self.ops.route(*arguments, num_tokens))
        ids_TK, weights_TK = self.ops.route(*arguments)
        if num_tokens < ids_TK.shape[0]:
            ids_TK[num_tokens:] = -1
        return Routing(ids_TK, weights_TK)
