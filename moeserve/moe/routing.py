"""The router, which chooses each token's experts and their weights.

T: tokens. E: experts. K: experts per token. D: model width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moeserve.ops.elementwise import weights_of
from moeserve.ops.inputs import RowContext
from moeserve.ops.linear import LinearMethod
from moeserve.ops.rules import RouterRule
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's choice for each token."""

    ids_TK: Tensor  # experts, best first, int32; -1 for padding
    weights_TK: Tensor  # factors of the experts' results, fp32
    # fp32: the factor of the token itself, as chosen experts that return their input; None: there
    # are no such experts
    own_T1: Tensor | None = None

    def rows(self, rows: slice) -> "Routing":
        """Return the routing of a range of tokens, as views."""
        own_T1 = None if self.own_T1 is None else self.own_T1[rows]
        return Routing(self.ids_TK[rows], self.weights_TK[rows], own_T1)

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

    fusible: ClassVar[bool] = True  # kernels of whole MoE layers can do the same
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


@dataclass(frozen=True, slots=True)
class HashRouter(Router):
    """Chooses the experts of a token by its id (hash layers, arXiv 2106.04426; DeepSeek-V4).

    Scores only weigh the experts.
    """

    fusible: ClassVar[bool] = False
    experts_VK: Tensor | None = None  # int64: the experts of each token id

    def __call__(self, x_TD: Tensor, context: RowContext) -> Routing:
        """Look up each token's experts. Padding gets none."""
        assert self.experts_VK is not None
        logits_TE = self.gate(x_TD.float() if self.rule.fp32 else x_TD, context)
        ids_T = context.ids_T
        if ids_T is None:
            assert not len(x_TD), "a router needs the token ids"
            ids_T = torch.empty(0, dtype=torch.int64, device=x_TD.device)
        ids_TK = self.experts_VK.index_select(0, ids_T)
        weights_TK = weights_of(logits_TE, ids_TK, self.rule)
        rows_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None]
        return Routing(ids_TK.masked_fill(rows_T1 >= context.num_tokens, -1).int(), weights_TK)


@dataclass(frozen=True, slots=True)
class ZeroExpertRouter(Router):
    """A router that also chooses zero-computation experts (arXiv 2410.07348), which return their
    input (LongCat) or 0 (ZAYA). They are not dispatched.
    """

    fusible: ClassVar[bool] = False
    num_experts: int = 0  # those from this id on are zero-computation experts
    returns_input: bool = True

    def __call__(self, x_TD: Tensor, context: RowContext) -> Routing:
        """Choose experts for each token. Padding gets none."""
        routing = Router.__call__(self, x_TD, context)
        is_zero_TK = routing.ids_TK >= self.num_experts
        own_T1 = None
        if self.returns_input:
            own_TK = routing.weights_TK.masked_fill(~is_zero_TK, 0)
            own_T1 = own_TK[:, :1].clone()
            for k in range(1, self.top_k):  # a fixed order, unlike that of torch's sums
                own_T1 += own_TK[:, k : k + 1]
        return Routing(
            routing.ids_TK.masked_fill(is_zero_TK, -1),
            routing.weights_TK.masked_fill(is_zero_TK, 0),
            own_T1,
        )
