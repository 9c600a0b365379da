"""A stand-in for the package deep_ep: its signatures, its results and its pitfalls.

Ranks are threads, on the CPU.
"""

from tests.moe.deepep.fake import utils
from tests.moe.deepep.fake.elastic import ElasticBuffer, EPHandle
from tests.moe.deepep.fake.events import EventHandle, EventOverlap
from tests.moe.deepep.fake.low_latency import Buffer
from tests.moe.deepep.fake.tensors import topk_idx_t

__all__ = [
    "Buffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "topk_idx_t",
    "utils",
]
__version__ = "2.1.0"
