"""Which experts a token goes to: what every router returns and every all2all backend takes.

T tokens, E experts, K experts per token, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Routing:
    """ids_TK: int32 expert ids, best first, -1 where a row is padding. weights_TK: fp32, renormalised and scaled."""

    ids_TK: Tensor
    weights_TK: Tensor


class RouterRule(Protocol):
    """The numbers of a softmax router (loader/spec.py's RouterSpec)."""

    @property
    def score(self) -> str: ...
    @property
    def renormalize(self) -> bool: ...


class Router:
    """Scores all experts with one matrix product and keeps the best K."""

    def __init__(self, gate: Linear, top_k: int, rule: RouterRule, ops: Ops) -> None:
        self._gate = gate
        self._top_k = top_k
        self._rule = rule
        self._ops = ops

    def __call__(self, x_TD: Tensor, num_tokens: int | Tensor) -> Routing:
        """Route the first `num_tokens` rows; the rest are padding. A tensor, int32 [1]: with the Triton kernels."""
        rule = self._rule
        if isinstance(num_tokens, Tensor):
            choice = self._ops.route(self._gate(x_TD), self._top_k, rule.score, rule.renormalize, num_tokens)
            return Routing(*choice)
        ids_TK, weights_TK = self._ops.route(self._gate(x_TD), self._top_k, rule.score, rule.renormalize)
        if num_tokens < ids_TK.shape[0]:
            ids_TK[num_tokens:] = -1
        return Routing(ids_TK, weights_TK)
