"""Random weights (`load_format: dummy`), to benchmark a model with only its config.json."""

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.load_plan import LoadPlan, Param, Piece, kind_of
from moeserve.loader.row_table import MemoryRows, Rows
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight
from moeserve.loader.stored_format import StoredFormat
from moeserve.loader.weights import Reader, empty_weight
from moeserve.ops.quantized import E2M1, Quantized, QuantizeTo, Weight, group_of

PAGE = (1 << 20) + 7  # random numbers that all weights repeat; odd, so that rows of a weight differ
TABLE_ROWS = 4096  # different rows of a table that stays on disk
_STEPS = {  # kind -> standard deviation and maximum of the values
    "int8": (32, 127),
    "fp8": (32, 127),
    "int4": (3, 7),
    "fp4": (2, 6),
}


def quantized_format(quantize_to: QuantizeTo | None, num_inputs: int) -> StoredFormat:
    """Return the format of a linear layer with the setting `--quantization`."""
    assert quantize_to
    return StoredFormat(
        kind=quantize_to, group=group_of(num_inputs) if quantize_to == "int4" else 0
    )


def dummy_checkpoint(
    model_dir: Path,
    plan: LoadPlan,
    stored_as: Sequence[StoredFormat] = (),
    quantize_to: QuantizeTo | None = None,
) -> Checkpoint:
    """Return the headers of a checkpoint with all tensors of a plan, but without files.

    stored_as: formats in quantization_config; linear layers have the first one.
    quantize_to: without `stored_as`, linear layers already have this kind, which saves the time to
        quantize random numbers.

    Raises CheckpointError for a GGUF file.
    """
    tensors = {}
    stored = {}
    config_format = next(iter(stored_as), None)
    if config_format and config_format.layout == "ggml":
        raise CheckpointError(
            f"{model_dir} has weights, but load_format=dummy needs a config.json without weights; "
            "pass the model's directory, or use load_format=auto"
        )
    integers = {param.name for param in plan.params if param.int64}
    forms: dict[str, StoredFormat] = {}
    if config_format or quantize_to:
        for param in plan.params:
            if param.quantized_on_load:
                forms[param.name] = config_format or quantized_format(quantize_to, param.shape[-1])
    for piece in plan.pieces:
        name = piece.source
        form = forms.get(piece.param)
        if form is None:
            dtype = "I64" if piece.param in integers else "BF16"
            tensors[name] = _no_file(model_dir, name, dtype, piece.shape)
            continue
        values_shape = form.values_shape(piece.shape, piece.transposed)
        scales_shape = form.scales_shape(piece.shape, piece.transposed)
        zeros_shape = form.zeros_shape(piece.shape, piece.transposed)
        zeros = _no_file(model_dir, f"{name}_zero_point", "I32", zeros_shape)
        tensors[name] = _no_file(model_dir, name, form.values_dtype, values_shape)
        stored[name] = StoredWeight(
            form,
            values=tensors[name],
            scales=_no_file(model_dir, f"{name}_scale", "F32", scales_shape),
            zeros=zeros if form.zeros else None,
        )
    return Checkpoint(model_dir, tensors, stored)


def _no_file(model_dir: Path, name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """Describe a tensor that no file has."""
    return TensorInfo(name, model_dir, dtype, shape, offset=0, num_bytes=0)


class RandomReader(Reader):
    """A Reader that fills parameters with random numbers, the same at every start on a device.

    All parameters repeat one page of random numbers, each from another offset. Vectors are uniform
    around 1. Matrices have a standard deviation of 1 / sqrt(inputs), so that activations keep their
    size: nothing overflows, and routers choose all experts about equally often.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(Checkpoint(checkpoint.model_dir, {}))
        self._dummy_checkpoint = checkpoint
        self._below: dict[str, int] = {}  # `Param.below`, of parameters that have it

    def allocate(
        self, param: Param, pieces: list[Piece], dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """Return an uninitialized parameter.

        On CPUs the experts of a layer share the memory of one (stride 0), which is filled once.
        """
        if param.below:
            self._below[param.name] = param.below
        if device.type == "cuda" or kind_of(param.name).removesuffix("_bias") not in ("w13", "w2"):
            return empty_weight(self._dummy_checkpoint, param, pieces, dtype, device)
        one_expert = empty_weight(
            self._dummy_checkpoint,
            replace(param, shape=(1, *param.shape[1:])),
            pieces,
            dtype,
            device,
        )

        def expanded(part: Tensor) -> Tensor:
            return part.expand(param.shape[0], *part.shape[1:])

        if isinstance(one_expert, Quantized):
            return one_expert.each(expanded)
        return expanded(one_expert)

    def row_table(self, param: Param, pieces: Sequence[Piece], dtype: torch.dtype) -> Rows:
        """Return a table of few random rows, which repeat."""
        rows = torch.empty(min(param.shape[0], TABLE_ROWS), param.shape[1], dtype=dtype)
        _fill(zlib.crc32(param.name.encode()), rows)
        return MemoryRows(rows)

    def jobs(
        self, piece: Piece, weight: Any, max_bytes: int | None = None
    ) -> Iterator[Callable[[], int]]:
        """Yield a job that fills a piece; none for an expert that shares the first one's memory."""
        values = weight.values if isinstance(weight, Quantized) else weight
        if below := self._below.get(piece.param):
            yield partial(
                _fill_integers, zlib.crc32(piece.source.encode()), below, values[piece.at]
            )
            return
        shares_memory = values.stride(0) == 0
        if not shares_memory or piece.at[0] == 0:
            yield partial(_fill, zlib.crc32(piece.source.encode()), weight[piece.at])


@torch.inference_mode()
def _fill(seed: int, part: Weight) -> int:
    """Fill a weight. All scales of a quantized weight are equal."""
    if not isinstance(part, Quantized):
        scale = 0.0 if part.dim() == 1 else part.shape[-1] ** -0.5
        _repeat(_page("", part.dtype, scale, part.device), seed, part)
        return 0
    _repeat(_page(part.kind, part.values.dtype, 0.0, part.values.device), seed, part.values)
    part.scales.fill_(part.shape[-1] ** -0.5 / _STEPS[part.kind][0])
    if part.zeros is not None:
        part.zeros.fill_(8)
    return 0


@torch.inference_mode()
def _fill_integers(seed: int, below: int, rows: Tensor) -> int:
    """Fill each row with successive integers from 0 to below - 1, from a random one on."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    shape = (len(rows), 1)
    first = torch.randint(below, shape, generator=generator, device=rows.device)
    rows.copy_((first + torch.arange(rows.shape[1], device=rows.device)) % below)
    return 0


@functools.cache
@torch.inference_mode()
def _page(kind: str, dtype: torch.dtype, scale: float, device: torch.device) -> Tensor:
    """Return PAGE random numbers.

    kind: "" for floats, or the kind of a quantized weight's values.
    scale: standard deviation of floats; 0: uniform between 0.5 and 1.5.
    """
    generator = torch.Generator(device).manual_seed(PAGE)
    page = torch.empty(PAGE, device=device)
    if kind == "":
        if scale:
            page.normal_(0, scale, generator=generator)
        else:
            page.uniform_(0.5, 1.5, generator=generator)
        return page.to(dtype)
    deviation, highest = _STEPS[kind]
    page.normal_(0, deviation, generator=generator).clamp_(-highest, highest)
    if kind == "fp4":
        # About half-way between two numbers of E2M1
        bounds = torch.tensor(E2M1[1:8], device=device) - 0.25
        return (torch.bucketize(page.abs(), bounds) + 8 * (page < 0)).to(dtype)
    if kind == "fp8":
        return page.to(torch.float8_e4m3fn).view(dtype)
    return (page.round_() + (8 if kind == "int4" else 0)).to(dtype)


def _repeat(page: Tensor, seed: int, into: Tensor) -> None:
    """Fill a tensor with repetitions of the page, from an offset that `seed` decides."""
    page = page.roll(seed % PAGE)
    if into.is_contiguous():
        flat = into.view(-1)
    else:
        flat = torch.empty_like(into, memory_format=torch.contiguous_format).view(-1)
    num_pages = len(flat) // PAGE
    paged_size = num_pages * PAGE
    flat[:paged_size].view(num_pages, PAGE).copy_(page)
    flat[paged_size:].copy_(page[: len(flat) - paged_size])
    if not into.is_contiguous():
        into.copy_(flat.view(into.shape))
