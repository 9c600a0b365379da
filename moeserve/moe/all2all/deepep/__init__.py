"""All2all by DeepEP's kernels: adapters for the package `deep_ep` (https://github.com/deepseek-ai/DeepEP).

ht: `Buffer`, high throughput. ll: `Buffer`, low latency. v2: `ElasticBuffer`. Each is given the imported package.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from moeserve.moe.all2all.deepep.ht import DeepEPHighThroughput
from moeserve.moe.all2all.deepep.ll import DeepEPLowLatency
from moeserve.moe.all2all.deepep.v2 import DeepEPElastic

if TYPE_CHECKING:
    from moeserve.moe.all2all.base import All2All
    from moeserve.moe.all2all.registry import BackendFacts

ADAPTERS = {adapter.name: adapter for adapter in (DeepEPHighThroughput, DeepEPLowLatency, DeepEPElastic)}


def make(name: str, facts: BackendFacts) -> All2All:
    """The adapter called `name`. Raises Unavailable when the package does not load or cannot serve this model."""
    from moeserve.moe.all2all.registry import Unavailable

    try:
        lib: Any = importlib.import_module("deep_ep")
    except Exception as error:  # it checks drivers, compilers and NCCL, each with errors of its own
        raise Unavailable(f"{name}: the package deep_ep is installed but does not load: {error}") from error
    adapter = ADAPTERS[name]
    buffer = getattr(lib, adapter.needs, None)
    if buffer is None or "explicitly_destroy" not in inspect.signature(buffer).parameters:
        version = getattr(lib, "__version__", "of unknown version")
        raise Unavailable(f"{name} needs the {adapter.needs} of deep_ep 2.1 or newer; installed is {version}")
    if facts.top_k > adapter.max_top_k:
        raise Unavailable(f"{name} takes {adapter.max_top_k} experts per token at most, the model has {facts.top_k}")
    if facts.comm_sms % 2:
        raise Unavailable(f"{name} takes an even number of multiprocessors, parallel.comm_sms is {facts.comm_sms}")
    if facts.sms_asked and not adapter.takes_sms:
        raise Unavailable(f"{name}'s kernels take all multiprocessors, for microseconds; leave parallel.comm_sms out")
    return adapter(lib, facts)
