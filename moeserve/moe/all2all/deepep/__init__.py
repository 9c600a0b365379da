"""All-to-all backends that use DeepEP's kernels, from the package `deep_ep`
(https://github.com/deepseek-ai/DeepEP).

`ll.py` adapts `Buffer` in low-latency mode, `v2.py` adapts `ElasticBuffer`. This file imports the
package, checks its version and passes it to the adapter.
"""

import importlib
import inspect
from functools import partial
from importlib.util import find_spec
from typing import Any

from moeserve.moe.all2all.deepep.base import DeepEP
from moeserve.moe.all2all.deepep.ll import DeepEPLowLatency
from moeserve.moe.all2all.deepep.v2 import DeepEPElastic
from moeserve.moe.all2all.registry import BackendFacts, Unavailable

ADAPTERS: dict[str, type[DeepEP]] = {
    adapter.name: adapter for adapter in (DeepEPElastic, DeepEPLowLatency)
}


def _make(adapter: type[DeepEP], facts: BackendFacts) -> DeepEP:
    """Return the adapter. Raises Unavailable if the package is missing, does not load, or cannot
    serve this model.
    """
    name = adapter.name
    if find_spec("deep_ep") is None:
        raise Unavailable(
            f"{name} needs CUDA and the package deep_ep: pip install sgl-deep-ep, or build it from "
            "https://github.com/deepseek-ai/DeepEP"
        )
    try:
        lib: Any = importlib.import_module("deep_ep")
    # The package checks drivers, compilers and NCCL on import, and raises errors of many types.
    except Exception as error:
        raise Unavailable(
            f"{name}: the package deep_ep is installed but does not load: {error}"
        ) from error
    buffer = getattr(lib, adapter.needs, None)
    if buffer is None or "explicitly_destroy" not in inspect.signature(buffer).parameters:
        version = getattr(lib, "__version__", "of unknown version")
        raise Unavailable(
            f"{name} needs the {adapter.needs} of deep_ep 2.1 or newer; installed is {version}"
        )
    if facts.top_k > adapter.max_top_k:
        raise Unavailable(
            f"{name} supports at most {adapter.max_top_k} experts per token, the model "
            f"has {facts.top_k}"
        )
    if facts.comm_sms % 2:
        raise Unavailable(
            f"{name} needs an even number of multiprocessors; parallel.comm_sms is {facts.comm_sms}"
        )
    if facts.is_comm_sms_set and not adapter.takes_sms:
        raise Unavailable(
            f"{name}'s kernels use all multiprocessors, for microseconds at a time; remove "
            "parallel.comm_sms"
        )
    return adapter(lib, facts)


make_v2 = partial(_make, DeepEPElastic)
make_ll = partial(_make, DeepEPLowLatency)
