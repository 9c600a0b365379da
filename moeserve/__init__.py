"""moeserve serves Mixture-of-Experts language models with expert parallelism.

    from moeserve import LLM, SamplingParams
    with LLM("demo") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

Names are imported on first use, so that `import moeserve` and the command line stay fast and free
of torch.
"""

from typing import TYPE_CHECKING, Any

from moeserve.version import __version__

if TYPE_CHECKING:
    from moeserve.client import AsyncClient
    from moeserve.frontend.async_engine import AsyncEngine
    from moeserve.frontend.llm import LLM
    from moeserve.sampling import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncEngine",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

# The module of each exported name.
_HOME = {
    "AsyncClient": "moeserve.client",
    "AsyncEngine": "moeserve.frontend.async_engine",
    "LLM": "moeserve.frontend.llm",
    "SamplingParams": "moeserve.sampling",
    "StructuredOutputsParams": "moeserve.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moeserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
