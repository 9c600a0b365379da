"""All tensors of a model directory: one or many safetensors files, with or without an index."""

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
from moeserve.loader.gguf_config import gguf_tensors
from moeserve.loader.safetensors_file import TensorInfo, read_header
from moeserve.loader.stored import StoredWeight, find_stored
from moeserve.loader.stored_format import StoredFormat

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
SAMPLES = 64  # tensors of each dtype and shape that a fingerprint looks into
SAMPLE_BYTES = 4096
READ_BYTES = 4 << 20
_CONFIG_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checked headers of a model directory; no weight has been read."""

    model_dir: Path
    tensors: dict[str, TensorInfo]  # the parts of quantised weights included
    # quantised weights by the names that they would have unquantised
    stored: dict[str, StoredWeight] = field(default_factory=dict)
    activations: Activations = "auto"  # the setting
    # (kind, group, inputs) -> why no kernel takes such weights of a GGUF file, which are widened
    # then; "" if one does
    obstacle: Callable[[str, int, int], str] = lambda kind, group, inputs: ""
    # tensors of the index that no file has, and the files that should: a tied head, for example
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The names of all weights, quantised or not."""
        return self.tensors.keys() | self.stored.keys()

    def parts(self, name: str) -> list[TensorInfo]:
        """The tensors that make up a weight, the values first."""
        return self.stored[name].parts if name in self.stored else [self.tensors[name]]


def open_checkpoint(model_dir: Path, formats: Sequence[StoredFormat] = ()) -> Checkpoint:
    """Reads and checks every header. formats: of quantised weights. Raises CheckpointError with a
    remedy.
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
                f"{model_dir / INDEX} says that {file} has the tensor {name!r}, but "
                f"{tensors[name].path.name} has it; index and files are of different models: "
                "download all of them again"
            )
    absent = {name: file for name, file in index.items() if name not in tensors}
    return Checkpoint(model_dir, tensors, find_stored(tensors, formats), absent=absent)


def weight_files(model_dir: Path) -> list[Path]:
    """Returns the files that hold the weights, all of which exist.

    transformers' precedence: model.safetensors, then the files that the index names, then every
    safetensors file.
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
            "never opened; "
            "convert them: transformers' save_pretrained writes safetensors"
        )
    if not names:
        raise CheckpointError(
            f"{model_dir} has no *.safetensors file; download the model's weights"
        )
    return [model_file(model_dir, name) for name in sorted(names)]


def first_dtype(model_dir: Path) -> str | None:
    """Returns the dtype of the first weight, spelled as in config.json; None without weights of a
    known dtype.
    """
    try:
        tensors = read_header(weight_files(model_dir)[0])
    except CheckpointError:
        return None  # opening the checkpoint will say what is wrong
    dtypes = (_CONFIG_DTYPES.get(tensor.dtype) for tensor in tensors.values())
    return next((dtype for dtype in dtypes if dtype), None)


def _read_index(model_dir: Path) -> dict[str, str]:
    """Tensor -> file; empty without an index, or where a single file goes before it."""
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
    """Returns a hex digest, equal for equal files on any machine. Raises CheckpointError when a
    file cannot be read.

    Covers the config, the headers, and a few kilobytes of up to SAMPLES tensors of each kind: two
    trainings of one model differ in nothing else. A change of a few weights may go unseen.
    """
    digest = hashlib.sha256()
    kinds = defaultdict(list)
    with CheckpointError.instead_of(OSError, f"{checkpoint.model_dir} cannot be read"):
        folder = checkpoint.model_dir
        name = config_name(checkpoint.model_dir)
        digest.update(
            repr(read_json(folder, name)).encode()
            if is_gguf(folder)
            else model_file(folder, name).read_bytes()
        )
        for _, tensor in sorted(checkpoint.tensors.items()):
            place = tensor.path.name, tensor.offset, tensor.num_bytes
            digest.update(repr((tensor.name, tensor.dtype, tensor.shape, place)).encode())
            kinds[tensor.dtype, tensor.shape].append(tensor)
        for tensors in kinds.values():
            for tensor in tensors[
                :: -(-len(tensors) // SAMPLES)
            ]:  # evenly over the tensors of each kind
                with tensor.path.open("rb") as file:
                    file.seek(tensor.offset + max(0, tensor.num_bytes - SAMPLE_BYTES) // 2)
                    digest.update(file.read(min(SAMPLE_BYTES, tensor.num_bytes)))
    return digest.hexdigest()[:32]


def weights_digest(model_dir: Path, alive: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """Returns the SHA-256 (hexadecimal) of all that decides what a model computes: its config's
    values, and each tensor's name, dtype, shape and bytes, in whatever files; and the
    `fingerprint`. Call it in a thread.

    alive: called now and then; may raise. Raises CheckpointError, also if files change meanwhile.
    """
    checkpoint = open_checkpoint(model_dir)
    before = fingerprint(checkpoint)
    config = read_json(model_dir, config_name(model_dir))
    digest = hashlib.sha256(msgspec.json.encode(config, order="deterministic"))
    with CheckpointError.instead_of(OSError, f"{model_dir} cannot be read"):
        for _, tensor in sorted(checkpoint.tensors.items()):
            content = hashlib.sha256()
            end = tensor.offset + tensor.num_bytes
            with tensor.path.open("rb") as file:
                file.seek(tensor.offset)
                while left := end - file.tell():
                    alive()
                    part = file.read(min(left, READ_BYTES))
                    if not part:
                        raise CheckpointError(f"{tensor} ends early; download the model again")
                    content.update(part)
            digest.update(
                msgspec.json.encode([tensor.name, tensor.dtype, tensor.shape]) + content.digest()
            )
    if fingerprint(open_checkpoint(model_dir)) != before:
        raise CheckpointError(f"{model_dir} was written to while its weights were read: try again")
    return digest.hexdigest(), before
