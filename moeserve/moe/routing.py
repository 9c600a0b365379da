"""The router: which experts a token goes to, and with which weights.

T tokens, E experts, K experts per token, D model width.
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
    """The experts that the router chose: what every all2all backend takes.

    ids_TK: int32, best first; -1 where a row is padding. weights_TK: fp32, as the sum of results
    uses them.
    """

    ids_TK: Tensor
    weights_TK: Tensor

    def rows(self, rows: slice) -> "Routing":
        """Return the routing of some of the tokens, as views."""
        return Routing(self.ids_TK[rows], self.weights_TK[rows])

    def on_input(self, x_TD: Tensor) -> "tuple[Tensor, Routing]":
        """Return rows times the weight of their only expert, and the routing whose results count
        as they are.
        """
        assert self.weights_TK.shape[1] == 1, self.weights_TK.shape
        return (x_TD * self.weights_TK).to(x_TD.dtype), Routing(
            self.ids_TK, torch.ones_like(self.weights_TK)
        )


@dataclass(frozen=True, slots=True)
class Router:
    """Scores all experts by one matrix product, `gate`, and keeps the best `top_k`.

    gate: packed from an fp32 weight where the rule says fp32. bias_E, expert_scale_E: fp32, as
    `route` takes them.
    """

    gate: LinearMethod
    top_k: int
    rule: RouterRule
    ops: Ops
    bias_E: Tensor | None = None
    expert_scale_E: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.rule.bias == (self.bias_E is not None), self.rule
        assert self.top_k == 1 or not self.rule.on_input, self.top_k

    def __call__(self, x_TD: Tensor, context: RowContext) -> Routing:
        """Return the choices of each row; padding reaches no expert."""
        num_tokens = context.num_tokens
        logits_TE = self.gate(x_TD.float() if self.rule.fp32 else x_TD, context)
        arguments = logits_TE, self.top_k, self.rule, self.bias_E, self.expert_scale_E
        if isinstance(num_tokens, Tensor):
            return Routing(*self.ops.route(*arguments, num_tokens))
        ids_TK, weights_TK = self.ops.route(*arguments)
        if num_tokens < ids_TK.shape[0]:
            ids_TK[num_tokens:] = -1
        return Routing(ids_TK, weights_TK)
