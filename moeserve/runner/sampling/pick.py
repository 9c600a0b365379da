"""Choose the sampler for a device."""

from importlib.util import find_spec

from moeserve.ops import native_rows
from moeserve.runner.sampling.sampler import Sampler
from moeserve.runner.tables import Tables, Upload


def make_sampler(
    vocab_size: int, tables: Tables, upload: Upload, kernels: str, *, is_async: bool
) -> Sampler:
    """Return the fastest sampler for a device.

    kernels: config.device.kernels; "torch": the reference sampler.
    is_async: whether the device runs in parallel to the host, so that a sampler must not wait for
    results.

    Imports are local, because Triton is slow to import and may not be installed.
    """
    if kernels != "torch" and is_async and find_spec("triton"):
        from moeserve.runner.sampling.triton import TritonSampler

        return TritonSampler(vocab_size, tables, upload)
    if kernels != "torch" and not is_async and native_rows.AVAILABLE:
        from moeserve.runner.sampling.native import NativeSampler

        return NativeSampler(vocab_size, tables, upload)
    from moeserve.runner.sampling.reference import ReferenceSampler

    return ReferenceSampler(vocab_size, tables, upload)
