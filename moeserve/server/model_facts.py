"""What the model's files say about it, for the APIs of other servers that describe models."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.frontend.front_end import FrontEnd
from moeserve.loader.checkpoint import weight_files
from moeserve.loader.documents import read_optional_json
from moeserve.loader.files import config_name, is_gguf, model_file
from moeserve.loader.gguf_file import read_model
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec

_LICENSES = ("LICENSE", "LICENCE")  # names of files, without extensions
_MAX_LICENSE_BYTES = 64 * 1024
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# llama.cpp's names of the values of general.file_type
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    25: "IQ4_NL",
    30: "IQ4_XS",
    32: "BF16",
    38: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The description of a model, as its files give it."""

    architecture: str  # such as qwen3_moe, or GGUF's qwen3moe
    format: str  # safetensors or gguf
    quantization: str  # the format of most weights, such as BF16, FP8 or Q4_K_M
    num_bytes: int = 0  # of the files with weights
    modified_s: float = 0.0  # Unix time
    license: str = ""
    publisher: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # by GGUF's keys


def facts_of(front: FrontEnd) -> ModelFacts:
    """Return the facts about the served model. The first call reads its files, and blocks."""
    assert front.ready is not None
    architecture = front.ready.architecture.partition("For")[0].lower()
    return _read_facts(front.model_dir, architecture, _DTYPES.get(front.ready.dtype, ""))


def capabilities(front: FrontEnd) -> list[str]:
    """Return what the model can do, by Ollama's names."""
    found = ["completion"]
    call_format = front.answer_format or front.text_call_format
    if call_format is not None and front.chat_template is not None:
        found.append("tools")
    if front.answer_format is not None and front.answer_format.reasons:
        found.append("thinking")
    if front.tokenizer is not None and front.tokenizer.fim is not None:
        found.append("insert")
    return found


@lru_cache(maxsize=1)
def _read_facts(path: Path, architecture: str, dtype: str) -> ModelFacts:
    """Read the facts. architecture, dtype: used if the files are gone, or do not have them."""
    try:
        spec = read_model_spec(path)
        if is_gguf(path):
            return _gguf_facts(path, spec)
        return _safetensors_facts(path, spec, architecture)
    except (CheckpointError, OSError):
        return ModelFacts(architecture, "gguf" if is_gguf(path) else "safetensors", dtype)


def _gguf_facts(path: Path, spec: ModelSpec) -> ModelFacts:
    headers = read_model(path)
    metadata = headers[0].metadata
    stats = [header.path.stat() for header in headers]
    file_type = metadata.get("general.file_type")
    known_type = _FILE_TYPES.get(file_type) if isinstance(file_type, int) else None
    return ModelFacts(
        architecture=str(metadata["general.architecture"]),
        format="gguf",
        quantization=known_type or _quantization(spec),
        num_bytes=sum(stat.st_size for stat in stats),
        modified_s=max(stat.st_mtime for stat in stats),
        license=str(metadata.get("general.license", "")),
        publisher=_publisher(path) or str(metadata.get("general.organization", "")),
        # Arrays are vocabularies and merges, which have megabytes.
        metadata={
            key: value
            for key, value in metadata.items()
            if isinstance(value, str | int | float) and "chat_template" not in key
        },
    )


def _safetensors_facts(path: Path, spec: ModelSpec, architecture: str) -> ModelFacts:
    config = read_optional_json(path, config_name(path))
    architecture = str(config.get("model_type") or architecture)
    stats = [file.stat() for file in _weights(path)]
    return ModelFacts(
        architecture=architecture,
        format="safetensors",
        quantization=_quantization(spec),
        num_bytes=sum(stat.st_size for stat in stats),
        modified_s=max((stat.st_mtime for stat in stats), default=path.stat().st_mtime),
        license=_license_text(path),
        publisher=_publisher(path),
        metadata=_metadata(spec, architecture),
    )


def _quantization(spec: ModelSpec) -> str:
    """Return the format of the experts, which are most of the weights: the smallest one."""
    if not spec.stored:
        return _DTYPES[spec.dtype]
    smallest = min(spec.stored, key=lambda stored: stored.bytes_per_weight)
    return smallest.ggml or smallest.kind.upper()


def _weights(path: Path) -> list[Path]:
    """Return the files with weights; none if they are random (`load_format: dummy`)."""
    try:
        return weight_files(path)
    except CheckpointError:
        return []


def _metadata(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """Return what GGUF's metadata would have."""
    values = {
        "block_count": spec.num_layers,
        "embedding_length": spec.hidden_size,
        "vocab_size": spec.vocab_size,
    }
    if spec.num_experts:
        values["expert_count"] = spec.num_experts
        values["expert_used_count"] = spec.experts_per_token
        values["expert_feed_forward_length"] = spec.expert_size
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _license_text(path: Path) -> str:
    """Return the text of the model's license file; "" without one."""
    names = [name for name in os.listdir(path) if name.partition(".")[0].upper() in _LICENSES]
    for name in sorted(names):
        with suppress(CheckpointError), model_file(path, name).open("rb") as file:
            return file.read(_MAX_LICENSE_BYTES).decode(errors="replace")
    return ""


def _publisher(path: Path) -> str:
    """Return the organization of a model in the Hugging Face cache; otherwise ""."""
    names: Iterator[str] = (folder.name for folder in path.parents)
    cached = next((name for name in names if name.startswith("models--")), "")
    return cached.split("--")[1] if cached.count("--") > 1 else ""
