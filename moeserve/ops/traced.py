"""torch.compile for the code between attention and experts, with a cache on disk.

Equal layers share one compiled function. Norms, activations and scalings are fused by generated
code. Products stay those of the vendor's library. Attention, experts and the KV write are excluded,
because their kernels are better than generated code; they break the graph.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from moeserve.kernels.configs import cache_folder
from moeserve.ops import elementwise
from moeserve.ops.linear import PlainLinear
from moeserve.ops.table import Ops

logger = logging.getLogger(__name__)
opaque: Callable[[Any], Any] = torch.compiler.disable
OPAQUE = (  # kernels that are excluded from compilation
    "qk_norm_rope_cache",
    "latent_rope_cache",
    "causal_conv",
    "recurrence",
    "selective_scan",
    "attention",
)
FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch can only be configured by this environment variable


def traced(ops: Ops) -> Ops:
    """Return the table whose `compile` is torch.compile, with plain torch for small kernels.

    Generated code is not batch-invariant, so this is not for tables that must be.
    """
    assert not ops.native, "native kernels are fused already"
    folder = os.environ.setdefault(FOLDER, str(cache_folder("compiled")))
    logger.info(
        "compiling layers with torch %s; compiled code is cached in %s", torch.__version__, folder
    )
    return replace(
        ops,
        description=f"{ops.description}, norms and activations: torch.compile",
        compile=partial(torch.compile, dynamic=True),  # one compilation for all sizes of steps
        opaque=cache(opaque),  # layers must get the same wrapper to share compiled code
        pack_linear=lambda weight, bias: _plain_or_opaque(ops.pack_linear(weight, bias)),
        pack_heads=lambda weight: _plain_or_opaque(ops.pack_heads(weight)),
        rms_norm=elementwise.rms_norm,
        add_rms_norm=elementwise.add_rms_norm,
        act_mul=partial(elementwise.act_mul, threads=1),  # generated code has no scalar tail
        sigmoid_gate=elementwise.plain_sigmoid_gate,
        sigmoid=torch.sigmoid,
        softplus=F.softplus,
        **{name: opaque(getattr(ops, name)) for name in OPAQUE},
    )


def _plain_or_opaque(product: Any) -> Any:
    """Return torch's own products unchanged, and exclude others from compilation."""
    if isinstance(product, PlainLinear):
        return product
    return opaque(type(product).__call__.__get__(product))
