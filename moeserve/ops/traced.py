"""torch.compile for what lies between attention and experts: one trace for all layers that are alike, kept on disk.

Products stay the vendor's; norms, activations and scalings are generated and joined. Attention, experts and the KV
write stay as they are: they are better than what could be generated, and they break the graph.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.kernels.configs import cache_folder
from moeserve.ops import elementwise
from moeserve.ops.linear import Linear, PlainLinear
from moeserve.ops.table import Ops

logger = logging.getLogger(__name__)
F_ = TypeVar("F_", bound=Callable[..., Any])
opaque: Callable[[Any], Any] = torch.compiler.disable
FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it from the environment alone


def silu_mul(gate_up_MI: Tensor) -> Tensor:
    """SwiGLU as in ops/elementwise.py, without its padding: generated code treats all columns alike."""
    gate, up = gate_up_MI.chunk(2, dim=-1)
    return F.silu(gate) * up


def trace(function: F_) -> F_:
    """Compiles a function at its first call; sizes of steps are variables of the trace."""
    return torch.compile(function, dynamic=True)  # type: ignore[return-value]


def traced(ops: Ops) -> Ops:
    """Returns the table with `trace` for functions that model code marks, and plain torch in place of small kernels.

    Not for tables whose bits must not depend on the batch: generated code promises nothing of the kind.
    """
    assert not ops.native, "native kernels are joined already"
    folder = os.environ.setdefault(FOLDER, str(cache_folder("compiled")))
    logger.info("compiling layers with torch %s; what was compiled is kept in %s", torch.__version__, folder)
    return replace(
        ops,
        chosen=(*ops.chosen, ("norms and activations", "torch.compile")),
        trace=trace,
        opaque=cache(opaque),  # one for all layers: a trace is of the very function
        pack_linear=lambda weight, bias: _plain_or_opaque(ops.pack_linear(weight, bias)),
        rms_norm=elementwise.rms_norm,
        add_rms_norm=elementwise.add_rms_norm,
        silu_mul=silu_mul,
        sigmoid_gate=elementwise.plain_sigmoid_gate,
        qk_norm_rope_cache=opaque(ops.qk_norm_rope_cache),
        attention=opaque(ops.attention),
    )


def _plain_or_opaque(linear: Linear) -> Linear:
    """Only torch's own products can be traced."""
    if isinstance(linear, PlainLinear):
        return linear
    packed: Linear = opaque(type(linear).__call__.__get__(linear))
    return packed
