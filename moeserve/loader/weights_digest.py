"""A digest of everything in a checkpoint that decides what the model computes: all of its bytes, unlike `fingerprint`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import fingerprint, open_checkpoint
from moeserve.loader.files import config_name, read_json
from moeserve.loader.safetensors_file import TensorInfo

READ_BYTES = 4 << 20


def weights_digest(model_dir: Path, alive: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """Returns the digest (SHA-256, hexadecimal) of the config's values and of each tensor's name, dtype, shape and bytes,
    however they are spread over files; and the checkpoint's `fingerprint`. Reads everything: call it in a thread.

    alive: called now and then; may raise. Raises CheckpointError.
    """
    checkpoint = open_checkpoint(model_dir)
    before = fingerprint(checkpoint)
    config = read_json(model_dir, config_name(model_dir))
    digest = hashlib.sha256(msgspec.json.encode(config, order="deterministic"))
    for _, tensor in sorted(checkpoint.tensors.items()):
        head = [tensor.name, tensor.dtype, tensor.shape]
        digest.update(msgspec.json.encode(head) + _digest_of(tensor, alive))
    if fingerprint(open_checkpoint(model_dir)) != before:
        raise CheckpointError(f"{model_dir} was written to while its weights were read: start again")
    return digest.hexdigest(), before


def _digest_of(tensor: TensorInfo, alive: Callable[[], None]) -> bytes:
    digest, left = hashlib.sha256(), tensor.num_bytes
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            while left:
                alive()
                part = file.read(min(left, READ_BYTES))
                if not part:
                    raise CheckpointError(f"{tensor} ends early; download the model again")
                digest.update(part)
                left -= len(part)
    except OSError as error:
        raise CheckpointError(f"{tensor} cannot be read: {error}") from None
    return digest.digest()
