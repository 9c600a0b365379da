"""The router: which experts a token goes to, and with which weights.

T tokens, E experts, K experts per token, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.ops.linear import Linear
from moeserve.ops.rules import RouterRule
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that the router chose: what every all2all backend takes.

    ids_TK: int32, best first; -1 where a row is padding. weights_TK: fp32, as the sum of results uses them.
    """

    ids_TK: Tensor
    weights_TK: Tensor

    def rows(self, rows: slice) -> Routing:
        """Returns the routing of some of the tokens, as views."""
        return Routing(self.ids_TK[rows], self.weights_TK[rows])


@dataclass(frozen=True, slots=True)
class Router:
    """Scores all experts by one matrix product, `gate`, and keeps the best `top_k`."""

    gate: Linear
    top_k: int
    rule: RouterRule
    ops: Ops

    def __call__(self, x_TD: Tensor, num_tokens: int | Tensor) -> Routing:
        """Returns the choices of the first `num_tokens` rows; the rest are padding. num_tokens: an int, or with the
        Triton kernels an int32 tensor [1]."""
        rule = self.rule
        if isinstance(num_tokens, Tensor):
            return Routing(*self.ops.route(self.gate(x_TD), self.top_k, rule.score, rule.renormalize, num_tokens))
        ids_TK, weights_TK = self.ops.route(self.gate(x_TD), self.top_k, rule.score, rule.renormalize)
        if num_tokens < ids_TK.shape[0]:
            ids_TK[num_tokens:] = -1
        return Routing(ids_TK, weights_TK)
