"""The tensors of a checkpoint: one or many safetensors files, with or without an index, or GGUF."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moeserve.config import Activations
from moeserve.errors import CheckpointError
from moeserve.loader.documents import read_json
from moeserve.loader.files import config_name, is_gguf, model_file
from moeserve.loader.gguf_tensors import gguf_tensors
from moeserve.loader.safetensors_file import TensorInfo, read_header
from moeserve.loader.stored import StoredWeight, find_stored
from moeserve.loader.stored_format import StoredFormat

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
NUM_SAMPLES = 64  # tensors of each dtype and shape that a fingerprint samples
SAMPLE_BYTES = 4096  # bytes of each sampled tensor
READ_BYTES = 4 << 20  # bytes per read of a digest
_CONFIG_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checked headers of a checkpoint. No weight has been read."""

    model_dir: Path
    tensors: dict[str, TensorInfo]  # including the parts of quantized weights
    # Quantized weights, by the names that they have in an unquantized checkpoint
    stored: dict[str, StoredWeight] = field(default_factory=dict)
    activations: Activations = "auto"  # the setting
    # (kind, group, inputs) -> why no kernel supports such weights of a GGUF file, which are then
    # dequantized; "" if a kernel supports them
    obstacle: Callable[[str, int, int], str] = lambda kind, group, inputs: ""
    # Tensors in the index that no file has -> the file named there, for example of a tied LM head
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The names of all weights, quantized or not."""
        return self.tensors.keys() | self.stored.keys()

    def parts(self, name: str) -> list[TensorInfo]:
        """Return the tensors that make up a weight, starting with its values."""
        return self.stored[name].parts if name in self.stored else [self.tensors[name]]


def open_checkpoint(model_dir: Path, formats: Sequence[StoredFormat] = ()) -> Checkpoint:
    """Read and check every header. Raises CheckpointError.

    formats: of the quantized weights (loader/quantization.py).
    """
    if is_gguf(model_dir):
        return Checkpoint(model_dir, *gguf_tensors(model_dir))
    index = _read_index(model_dir)
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(model_dir):
        for tensor in read_header(path).values():
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{model_dir}: tensor {tensor.name!r} is in "
                    f"{tensors[tensor.name].path.name} and in {path.name}; "
                    "remove the file that does not belong to the model"
                )
            tensors[tensor.name] = tensor
    for name, file in index.items():
        if name in tensors and tensors[name].path.name != file:
            raise CheckpointError(
                f"{model_dir / INDEX} has the tensor {name!r} in {file}, but it is in "
                f"{tensors[name].path.name}; index and files are of different models: download "
                "all of them again"
            )
    missing = {name: file for name, file in index.items() if name not in tensors}
    return Checkpoint(model_dir, tensors, find_stored(tensors, formats), missing=missing)


def weight_files(model_dir: Path) -> list[Path]:
    """Return the files with the model's weights. Raises CheckpointError if one is missing.

    With transformers' precedence: model.safetensors, then the files in the index, then all
    safetensors files in the directory.
    """
    if index := _read_index(model_dir):
        names = set(index.values())
    elif os.path.lexists(model_dir / SINGLE):
        names = {SINGLE}
    else:
        names = {path.name for path in model_dir.glob("*.safetensors")}
    if not names and (
        pickled := sorted(path.name for path in model_dir.glob("*") if path.suffix in _PICKLED)
    ):
        raise CheckpointError(
            f"{model_dir} has only pickled weights ({pickled[0]}), which can run code and are "
            "never opened; convert them with transformers' save_pretrained, which writes "
            "safetensors"
        )
    if not names:
        raise CheckpointError(
            f"{model_dir} has no *.safetensors file; download the model's weights"
        )
    return [model_file(model_dir, name) for name in sorted(names)]


def first_dtype(model_dir: Path) -> str | None:
    """Return the dtype of the first weight with a known one, spelled as in config.json."""
    try:
        tensors = read_header(weight_files(model_dir)[0])
    except CheckpointError:
        return None  # `open_checkpoint` will raise it again
    dtypes = (_CONFIG_DTYPES.get(tensor.dtype) for tensor in tensors.values())
    return next((dtype for dtype in dtypes if dtype), None)


def _read_index(model_dir: Path) -> dict[str, str]:
    """Return the index, tensor -> file; {} if there is none or model.safetensors precedes it."""
    if os.path.lexists(model_dir / SINGLE) or not os.path.lexists(model_dir / INDEX):
        return {}
    weight_map = read_json(model_dir, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{model_dir / INDEX}: weight_map must be a non-empty object; download it again"
        )
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{model_dir / INDEX}: weight_map[{tensor!r}] is {file!r}; it must name a "
                ".safetensors file"
            )
    return weight_map


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a hexadecimal digest that is equal for equal files on any machine.

    It covers the config, the headers, and a few kilobytes of up to NUM_SAMPLES tensors of each
    dtype and shape, because two trainings of one model differ in their weights alone. It may miss a
    change of a few weights. Raises CheckpointError if a file cannot be read.
    """
    digest = hashlib.sha256()
    similar = defaultdict(list)  # (dtype, shape) -> tensors
    with CheckpointError.instead_of(OSError, f"{checkpoint.model_dir} cannot be read"):
        folder = checkpoint.model_dir
        name = config_name(checkpoint.model_dir)
        digest.update(
            repr(read_json(folder, name)).encode()
            if is_gguf(folder)
            else model_file(folder, name).read_bytes()
        )
        for _, tensor in sorted(checkpoint.tensors.items()):
            position = tensor.path.name, tensor.offset, tensor.num_bytes
            digest.update(repr((tensor.name, tensor.dtype, tensor.shape, position)).encode())
            similar[tensor.dtype, tensor.shape].append(tensor)
        for tensors in similar.values():
            step = -(-len(tensors) // NUM_SAMPLES)
            for tensor in tensors[::step]:
                with tensor.path.open("rb") as file:
                    file.seek(tensor.offset + max(0, tensor.num_bytes - SAMPLE_BYTES) // 2)
                    digest.update(file.read(min(SAMPLE_BYTES, tensor.num_bytes)))
    return digest.hexdigest()[:32]


def weights_digest(
    model_dir: Path, on_progress: Callable[[], None] = lambda: None
) -> tuple[str, str]:
    """Return a digest of everything that decides the model's results, and the `fingerprint`.

    The digest (SHA-256, hexadecimal) covers the values of the config, and name, dtype, shape and
    bytes of each tensor, however they are split into files. It reads all files: call it in a
    thread. on_progress: called regularly; it may raise to end the work. Raises CheckpointError,
    also if files change meanwhile.
    """
    checkpoint = open_checkpoint(model_dir)
    fingerprint_before = fingerprint(checkpoint)
    config = read_json(model_dir, config_name(model_dir))
    digest = hashlib.sha256(msgspec.json.encode(config, order="deterministic"))
    with CheckpointError.instead_of(OSError, f"{model_dir} cannot be read"):
        for _, tensor in sorted(checkpoint.tensors.items()):
            content = hashlib.sha256()
            end = tensor.offset + tensor.num_bytes
            with tensor.path.open("rb") as file:
                file.seek(tensor.offset)
                while num_left := end - file.tell():
                    on_progress()
                    part = file.read(min(num_left, READ_BYTES))
                    if not part:
                        raise CheckpointError(f"{tensor} ends early; download the model again")
                    content.update(part)
            digest.update(
                msgspec.json.encode([tensor.name, tensor.dtype, tensor.shape]) + content.digest()
            )
    if fingerprint(open_checkpoint(model_dir)) != fingerprint_before:
        raise CheckpointError(f"{model_dir} changed while its weights were read; try again")
    return digest.hexdigest(), fingerprint_before
