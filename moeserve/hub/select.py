"""Which files of a repository moeserve reads: those of one model, and no others.

A repository may have safetensors beside GGUF files in many quantizations, pickles, and the files of
other programs. The same rules choose among the files on the hub and those in the cache.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath

from moeserve.errors import CheckpointError
from moeserve.hub.names import HubName
from moeserve.hub.units import size_text

DEFAULT_QUANT = "Q4_K_M"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken")
_TEXT_NAMES = ("vocab.txt", "merges.txt")
_TEMPLATES = "additional_chat_templates"
_CONFIGS = ("config.json", "params.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.IGNORECASE)  # a file of a split GGUF model
_LABEL = re.compile(
    r"(?:^|[-._/])"
    r"((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F(?:P)?16|F32))"
    r"(?=$|[-._/])",
    re.IGNORECASE,
)
_ENCODER_TYPES = ("F16", "BF16", "F32")  # of image encoders, the preferred one first
# Bytes in memory for each byte of a GGUF file: its weights, a KV cache and buffers.
_MEMORY_PER_BYTE = 1.1
_MAX_LISTED = 24  # names in an error message


class SeveralModels(CheckpointError):
    """A name means several models."""


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """A GGUF model in a repository."""

    files: tuple[str, ...]  # the parts of a split model in order
    size: int  # bytes of all files
    label: str  # such as Q4_K_M; the name of the file if that has none
    num_missing: int = 0  # parts of a split model that are not there

    @property
    def stem(self) -> str:
        """The name of the first file, without its number and extension."""
        return _stem(self.files[0])

    def is_named(self, quant: str) -> bool:
        """Return whether this is the quantization that a user names so."""
        wanted = quant.upper().replace("FP16", "F16")
        return wanted in (self.label.upper(), self.stem.upper())

    def __str__(self) -> str:
        return f"{self.label} ({size_text(self.size)})"


@dataclass(frozen=True, slots=True)
class FileSelection:
    """The files of one model."""

    folder: str  # in the repository, "" for its top; of safetensors
    texts: tuple[str, ...] = ()  # config, tokenizer, templates, index
    weights: tuple[str, ...] = ()  # of safetensors without an index; with one, the index has them
    index: str = ""  # path of the index, "" if there is none or it is not used
    gguf: GGUFModel | None = None
    encoders: tuple[str, ...] = ()  # the image encoder that belongs to a GGUF model
    note: str = ""  # why this GGUF model was chosen, if it was not named


def select(
    sizes: Mapping[str, int], name: HubName, memory: Callable[[], int] = lambda: 0
) -> FileSelection:
    """Return the files of the model that a name means. Raises CheckpointError.

    Args:
        sizes: The bytes of each file of the repository, by path.
        memory: Returns the bytes of memory that a model may use; called if no quantization is
            named and there is a choice.
    """
    folder, file = _folder_and_file(sizes, name)
    if file and _is_gguf(file):
        return _select_gguf(sizes, name, _model_with(gguf_models(sizes, folder), file))
    inside = [path for path in sizes if _parent(path) == folder]
    names = {PurePosixPath(path).name for path in inside}
    has_safetensors = any(path.endswith(".safetensors") for path in names)
    if has_safetensors and names & set(_CONFIGS) and not name.quant:
        return _select_safetensors(sizes, folder, inside)
    models = gguf_models(sizes, folder)
    if not models:
        raise CheckpointError(_why_nothing(name, sizes, folder))
    model, note = _choose(models, name, memory)
    return _select_gguf(sizes, name, model, note)


def indexed(weight_map: object, folder: str) -> tuple[str, ...]:
    """Return the paths of the weight files that an index names. Raises CheckpointError."""
    files = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not files or not all(map(_is_weight_name, files)):
        raise CheckpointError(
            f"{INDEX} does not name safetensors files beside it; the repository is damaged"
        )
    return tuple(sorted(_join(folder, file) for file in files))


def _is_weight_name(name: object) -> bool:
    """Return whether an index may name this as a file of weights. A pickle is none."""
    return isinstance(name, str) and "/" not in name and name.endswith(".safetensors")


def _folder_and_file(sizes: Mapping[str, int], name: HubName) -> tuple[str, str]:
    """Return the folder in which a name's model is, and the file that the name names, or ""."""
    path = name.path
    if path in sizes:
        return _parent(path), path
    if not path or any(each.startswith(f"{path}/") for each in sizes):
        return path, ""
    files = sorted(each for each in sizes if _is_gguf(each) or each.endswith(".safetensors"))
    raise CheckpointError(
        f"{name.repo} has no file or folder {path!r}; it has {_listed(files) or 'no weights'}"
    )


def _select_safetensors(sizes: Mapping[str, int], folder: str, inside: list[str]) -> FileSelection:
    texts = [
        path
        for path in inside
        if path.endswith(_TEXT_SUFFIXES) or PurePosixPath(path).name in _TEXT_NAMES
    ]
    templates = _join(folder, _TEMPLATES)
    texts += [path for path in sizes if _parent(path) == templates and path.endswith(".jinja")]
    index = _join(folder, INDEX)
    single = _join(folder, SINGLE)
    weights: tuple[str, ...] = ()
    if single in sizes:
        index = ""
        weights = (single,)
    elif index not in sizes:
        index = ""
        weights = tuple(sorted(path for path in inside if path.endswith(".safetensors")))
    return FileSelection(folder, texts=tuple(sorted(texts)), weights=weights, index=index)


def _select_gguf(
    sizes: Mapping[str, int], name: HubName, model: GGUFModel, note: str = ""
) -> FileSelection:
    if model.num_missing:
        raise CheckpointError(
            f"{name.repo}: {model.num_missing} of the files of {model.files[0]} are missing there; "
            "the repository is incomplete"
        )
    encoder = _encoder(sizes, model)
    encoders = (encoder,) if encoder else ()
    return FileSelection(_parent(model.files[0]), gguf=model, encoders=encoders, note=note)


def _encoder(sizes: Mapping[str, int], model: GGUFModel) -> str:
    """Return the image encoder (mmproj) beside a model, or in a folder above it; "" if none."""
    folder = PurePosixPath(model.files[0]).parent
    for above in (folder, *folder.parents):
        found = [
            path
            for path in sorted(sizes)
            if _is_gguf(path) and _is_encoder(path) and PurePosixPath(path).parent == above
        ]
        by_type = {_label(_stem(path)).upper(): path for path in reversed(found)}
        preferred = [by_type[each] for each in _ENCODER_TYPES if each in by_type]
        if found:
            return (preferred or found)[0]
    return ""


def gguf_models(sizes: Mapping[str, int], folder: str = "") -> list[GGUFModel]:
    """Return the GGUF models in a folder and below it."""
    prefix = f"{folder}/" if folder else ""
    paths = [
        path
        for path in sorted(sizes)
        if path.startswith(prefix) and _is_gguf(path) and not _is_auxiliary(path)
    ]
    models = []
    for _, parts in groupby(sorted(paths, key=_model_key), key=_model_key):
        files = tuple(parts)
        split = _SPLIT.fullmatch(PurePosixPath(files[0]).stem)
        num_files = int(split[3]) if split else 1
        models.append(
            GGUFModel(
                files=files,
                size=sum(sizes[file] for file in files),
                label=_label(_stem(files[0])) or _label(_parent(files[0])) or _stem(files[0]),
                num_missing=max(0, num_files - len(files)),
            )
        )
    return models


def _model_key(path: str) -> tuple[str, str]:
    """Return what the files of one model have in common."""
    split = _SPLIT.fullmatch(PurePosixPath(path).stem)
    return (_parent(path), f"{split[1]}-of-{split[3]}") if split else (_parent(path), path)


def _model_with(models: Iterable[GGUFModel], file: str) -> GGUFModel:
    for model in models:
        if file in model.files:
            return model
    raise CheckpointError(f"{file} is not a model, but belongs to one; name the model's file")


def _choose(
    models: list[GGUFModel], name: HubName, memory: Callable[[], int]
) -> tuple[GGUFModel, str]:
    """Return the model with the named quantization, or the default one, and why it was chosen."""
    if name.quant:
        found = _named(models, name.quant)
        if not found:
            raise CheckpointError(
                f"{name.repo} has no quantization {name.quant}; it has {_listed(models)}"
            )
        return _only(found, name), ""
    if len(models) == 1:
        return models[0], ""
    if found := _named(models, DEFAULT_QUANT):
        return _only(found, name), f"{found[0].label}: the default quantization"
    if any(_label(model.label) == "" for model in models):  # files that are no quantizations
        return _only(models, name), ""
    limit = memory()
    fitting = [model for model in models if model.size * _MEMORY_PER_BYTE <= limit]
    if not fitting:
        raise CheckpointError(
            f"{name.repo} has no {DEFAULT_QUANT}, and no other quantization fits into "
            f"{size_text(limit)} of memory: {_listed(models)}; name one, as "
            f"{name.repo}:{min(models, key=lambda model: model.size).label}"
        )
    best = max(fitting, key=lambda model: model.size)
    best = _only([model for model in fitting if model.label == best.label], name)
    why = f"the largest that fits into {size_text(limit)} of memory, as there is no {DEFAULT_QUANT}"
    return best, f"{best}: {why}"


def _named(models: list[GGUFModel], quant: str) -> list[GGUFModel]:
    """Return the models with a quantization. Unsloth's dynamic ones may be named without UD-."""
    exact = [model for model in models if model.is_named(quant)]
    return exact or [model for model in models if model.is_named(f"UD-{quant}")]


def _only(models: list[GGUFModel], name: HubName) -> GGUFModel:
    if len(models) > 1:
        files = [model.files[0] for model in models]
        raise SeveralModels(
            f"{name} has several models ({_listed(files)}); pass one of them, as "
            f"{name.repo}/{files[0]}"
        )
    return models[0]


def _why_nothing(name: HubName, sizes: Mapping[str, int], folder: str) -> str:
    """Return the error for a folder without weights that moeserve reads."""
    where = str(name)
    files = sorted(path for path in sizes if not folder or path.startswith(f"{folder}/"))
    if name.quant and any(path.endswith(".safetensors") for path in files):
        return (
            f"{name.repo} has no GGUF files, and so no quantization {name.quant}; pass "
            f"{name.repo}, or the repository of its GGUF files"
        )
    if "adapter_config.json" in {PurePosixPath(path).name for path in files}:
        return f"{where} is an adapter (LoRA), which is not supported; pass the model itself"
    folders = {_parent(path) for path in files if path.endswith(".safetensors")} - {folder}
    if folders:
        inner = _listed(f"{name.repo}/{each}" for each in sorted(folders))
        return f"{where} has its models in folders; pass one of {inner}"
    if any(path.endswith(_PICKLES) for path in files):
        return (
            f"{where} has only pickled weights, which can run code and are never opened; pass a "
            "repository with safetensors or GGUF files"
        )
    return (
        f"{where} has no config.json with safetensors and no GGUF file, so it is not a model that "
        f"moeserve reads; it has {_listed(files) or 'no files'}"
    )


def _listed(items: Iterable[object]) -> str:
    texts = [str(item) for item in items]
    more = len(texts) - _MAX_LISTED
    return ", ".join(texts[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _is_gguf(path: str) -> bool:
    return path.lower().endswith(".gguf")


def _is_encoder(path: str) -> bool:
    return PurePosixPath(path).name.lower().startswith("mmproj")


def _is_auxiliary(path: str) -> bool:
    """Return whether a GGUF file is no model: an image encoder, or statistics of activations."""
    return _is_encoder(path) or "imatrix" in PurePosixPath(path).name.lower()


def _stem(path: str) -> str:
    """Return a GGUF file's name without its number and extension."""
    stem = PurePosixPath(path).stem
    split = _SPLIT.fullmatch(stem)
    return split[1] if split else stem


def _label(text: str) -> str:
    """Return the quantization in the name of a file or folder, "" if there is none."""
    labels = _LABEL.findall(text)
    return str(labels[-1]).replace("FP16", "F16") if labels else ""


def _parent(path: str) -> str:
    parent = str(PurePosixPath(path).parent)
    return "" if parent == "." else parent


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
