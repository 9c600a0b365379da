"""Tells one checkpoint from another without reading all of it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.files import model_file
from moeserve.loader.safetensors_file import TensorInfo

SAMPLES = 64  # tensors of each dtype and shape that are looked into
SAMPLE_BYTES = 4096


def fingerprint(checkpoint: Checkpoint) -> str:
    """Hex; equal for equal files, on any machine. Raises CheckpointError when a file cannot be read.

    Covers config.json, what the headers say, and a few kilobytes of up to SAMPLES tensors of each kind: two trainings
    of one model differ in nothing else. A change of a few weights may go unseen.
    """
    digest = hashlib.sha256()
    try:
        digest.update(model_file(checkpoint.model_dir, "config.json").read_bytes())
        for tensor in _ordered(checkpoint.tensors.values()):
            place = tensor.path.name, tensor.offset, tensor.num_bytes
            digest.update(repr((tensor.name, tensor.dtype, tensor.shape, place)).encode())
        for tensor in _samples(checkpoint):
            with tensor.path.open("rb") as file:
                file.seek(tensor.offset + max(0, tensor.num_bytes - SAMPLE_BYTES) // 2)
                digest.update(file.read(min(SAMPLE_BYTES, tensor.num_bytes)))
    except OSError as error:
        raise CheckpointError(f"{checkpoint.model_dir} cannot be read: {error}") from None
    return digest.hexdigest()[:32]


def _samples(checkpoint: Checkpoint) -> Iterator[TensorInfo]:
    """Evenly over the tensors of each kind."""
    kinds: dict[tuple[str, tuple[int, ...]], list[TensorInfo]] = defaultdict(list)
    for tensor in _ordered(checkpoint.tensors.values()):
        kinds[tensor.dtype, tensor.shape].append(tensor)
    for tensors in kinds.values():
        yield from tensors[:: -(-len(tensors) // SAMPLES)]


def _ordered(tensors: Iterable[TensorInfo]) -> Sequence[TensorInfo]:
    return sorted(tensors, key=lambda tensor: tensor.name)
