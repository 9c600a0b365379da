"""torch.compile for what lies between attention and experts: one trace for all layers that are
alike, kept on disk.

Products stay the vendor's; norms, activations and scalings are generated and joined. Attention,
experts and the KV write stay as they are: they are better than what could be generated, and they
break the graph.
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
OPAQUE = (  # to any trace
    "qk_norm_rope_cache",
    "latent_rope_cache",
    "causal_conv",
    "recurrence",
    "selective_scan",
    "attention",
)
FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it from the environment alone


def traced(ops: Ops) -> Ops:
    """Return the table with torch.compile for functions that model code marks, and plain torch for
    small kernels.

    Not for tables whose bits must not depend on the batch: generated code promises nothing of the
    kind.
    """
    assert not ops.native, "native kernels are joined already"
    folder = os.environ.setdefault(FOLDER, str(cache_folder("compiled")))
    logger.info(
        "compiling layers with torch %s; what was compiled is kept in %s", torch.__version__, folder
    )
    return replace(
        ops,
        chosen=f"{ops.chosen}, norms and activations: torch.compile",
        trace=partial(
            torch.compile, dynamic=True
        ),  # at the first call; sizes of steps are variables of the trace
        opaque=cache(opaque),  # one for all layers: a trace is of the very function
        pack_linear=lambda weight, bias: _plain_or_opaque(ops.pack_linear(weight, bias)),
        pack_heads=lambda weight: _plain_or_opaque(ops.pack_heads(weight)),
        rms_norm=elementwise.rms_norm,
        add_rms_norm=elementwise.add_rms_norm,
        act_mul=partial(elementwise.act_mul, threads=1),  # generated code treats all columns alike
        sigmoid_gate=elementwise.plain_sigmoid_gate,
        sigmoid=torch.sigmoid,
        softplus=F.softplus,
        **{name: opaque(getattr(ops, name)) for name in OPAQUE},
    )


def _plain_or_opaque(product: Any) -> Any:
    """Only torch's own products can be traced."""
    return (
        product
        if isinstance(product, PlainLinear)
        else opaque(type(product).__call__.__get__(product))
    )
