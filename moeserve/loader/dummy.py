"""Random weights in place of a checkpoint's, for measuring a model of which only config.json is
present.
"""

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
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight
from moeserve.loader.stored_format import StoredFormat
from moeserve.loader.weights import Reader, empty_weight
from moeserve.ops.quantised import E2M1, Quantised, QuantizeTo, Weight, group_of

PAGE = (1 << 20) + 7  # odd, so that no two rows of a weight are alike
_STEPS = {
    "int8": (32, 127),
    "fp8": (32, 127),
    "int4": (3, 7),
    "fp4": (2, 6),
}  # standard deviation and most


def rounded_format(asked: QuantizeTo | None, num_inputs: int) -> StoredFormat:
    """Returns how `--quantization` keeps a linear layer."""
    assert asked
    return StoredFormat(kind=asked, group=group_of(num_inputs) if asked == "int4" else 0)


def imagined(
    model_dir: Path,
    plan: LoadPlan,
    stored_as: Sequence[StoredFormat] = (),
    asked: QuantizeTo | None = None,
) -> Checkpoint:
    """Returns a checkpoint with all that the plan asks for. stored_as: its linear layers have the
    first of these; asked: else they are rounded so already, which saves to round them. Raises
    CheckpointError for a GGUF file."""
    tensors = {}
    stored = {}
    form = next(iter(stored_as), None)
    if form and form.layout == "ggml":
        raise CheckpointError(
            f"{model_dir} has weights: load_format=dummy is for a config.json without any"
        )
    linear = {param.name: param.shape[-1] for param in plan.params if param.quantised_on_load}
    forms = (
        {name: form or rounded_format(asked, width) for name, width in linear.items()}
        if form or asked
        else {}
    )
    for piece in plan.pieces:
        name = piece.source
        shape = (piece.shape, piece.transposed)
        tensors[name] = TensorInfo(name, model_dir, "BF16", piece.shape, 0, 0)
        if form := forms.get(piece.param):
            values = form.values_shape(*shape)
            scales = form.scales_shape(*shape)
            zeros = form.zeros_shape(*shape)
            tensors[name] = TensorInfo(name, model_dir, form.values_dtype, values, 0, 0)
            stored[name] = StoredWeight(
                form,
                tensors[name],
                TensorInfo(f"{name}_scale", model_dir, "F32", scales, 0, 0),
                TensorInfo(f"{name}_zero_point", model_dir, "I32", zeros, 0, 0)
                if form.zeros
                else None,
            )
    return Checkpoint(model_dir, tensors, stored)


class RandomReader(Reader):
    """A reader of random numbers, the same in every start on a device: a page of them over and
    over, of which each tensor begins somewhere else.

    Vectors lie around 1; products keep their inputs' size, so nothing overflows and routers choose
    all experts alike.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(Checkpoint(checkpoint.model_dir, {}))
        self._imagined = checkpoint

    def memory(
        self, param: Param, pieces: list[Piece], dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """See `Reader`. On a CPU one expert stands for all of its layer (stride 0), which are then
        packed as copies.
        """
        if device.type == "cuda" or kind_of(param.name).removesuffix("_bias") not in ("w13", "w2"):
            return empty_weight(self._imagined, param, pieces, dtype, device)
        one = empty_weight(
            self._imagined, replace(param, shape=(1, *param.shape[1:])), pieces, dtype, device
        )

        def copies(part: Tensor) -> Tensor:
            return part.expand(param.shape[0], *part.shape[1:])

        return one.each(copies) if isinstance(one, Quantised) else copies(one)

    def jobs(
        self, piece: Piece, param: Any, limit: int | None = None
    ) -> Iterator[Callable[[], int]]:
        """Yields one job, which fills a piece with random numbers; none for a copy of the first
        expert.
        """
        values = param.values if isinstance(param, Quantised) else param
        if values.stride(0) or piece.at[0] == 0:
            yield partial(_fill, zlib.crc32(piece.source.encode()), param[piece.at])


@torch.inference_mode()
def _fill(seed: int, part: Weight) -> int:
    """Values of a quantised weight are of all sizes that its kind has, with one scale for all."""
    if not isinstance(part, Quantised):
        scale = 0.0 if part.dim() == 1 else part.shape[-1] ** -0.5
        _spread(_page("", part.dtype, scale, part.device), seed, part)
        return 0
    _spread(_page(part.kind, part.values.dtype, 0.0, part.values.device), seed, part.values)
    part.scales.fill_(part.shape[-1] ** -0.5 / _STEPS[part.kind][0])
    if part.zeros is not None:
        part.zeros.fill_(8)
    return 0


@functools.cache
@torch.inference_mode()
def _page(kind: str, dtype: torch.dtype, scale: float, device: torch.device) -> Tensor:
    """PAGE numbers: normal ones times `scale`, uniform ones around 1 for 0, or the values of a
    quantised kind.
    """
    generator = torch.Generator(device).manual_seed(PAGE)
    plain = torch.empty(PAGE, device=device)
    if kind == "":
        return (
            plain.normal_(0, scale, generator=generator)
            if scale
            else plain.uniform_(0.5, 1.5, generator=generator)
        ).to(dtype)
    steps, most = _STEPS[kind]
    plain.normal_(0, steps, generator=generator).clamp_(-most, most)
    if kind == "fp4":
        sizes = (
            torch.tensor(E2M1[1:8], device=device) - 0.25
        )  # about where one number is nearer than the next
        return (torch.bucketize(plain.abs(), sizes) + 8 * (plain < 0)).to(dtype)
    if kind == "fp8":
        return plain.to(torch.float8_e4m3fn).view(dtype)
    return (plain.round_() + (8 if kind == "int4" else 0)).to(dtype)


def _spread(page: Tensor, seed: int, into: Tensor) -> None:
    page = page.roll(seed % PAGE)
    flat = (
        into.view(-1)
        if into.is_contiguous()
        else torch.empty_like(into, memory_format=torch.contiguous_format).view(-1)
    )
    whole = len(flat) // PAGE
    flat[: whole * PAGE].view(whole, PAGE).copy_(page)
    flat[whole * PAGE :].copy_(page[: len(flat) - whole * PAGE])
    if not into.is_contiguous():
        into.copy_(flat.view(into.shape))
