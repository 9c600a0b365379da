"""Formats of dispatched rows: the model's own dtype, or fp8 with a scale for every 128 elements.

The bytes of a row depend on that row alone. A lossy format is also applied to rows that stay on
their rank; otherwise, the bits of a result would depend on which rank has an expert.

T: rows. D: elements of a row. B: bytes of an encoded row. b: blocks of a row. n: elements of a
block.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moeserve.errors import ConfigError

# The length of an encoded row is a multiple of so many bytes, so that rows can be copied, and
# viewed as tensors, in wide elements.
ALIGNMENT = 16
BLOCK = 128  # elements that share a scale
E4M3_MAX = 448.0
LEAST_AMAX = 1e-4  # lower bound of a block's largest magnitude, against division by zero
CHUNK = 1 << 20  # elements that are converted at a time
RAW = ("float32", "bfloat16", "float16")
FP8 = "fp8_b128"


def wire_of(name: str, dtype: torch.dtype) -> "WireFormat":
    """Return the format called `name`; "auto" is `dtype` itself.

    Raises ConfigError for an unknown name.
    """
    own = str(dtype).removeprefix("torch.")
    if name in ("auto", own) and own in RAW:
        return RawWire(dtype)
    if name == FP8:
        return Fp8Wire()
    raise ConfigError(f"no wire format {name!r} for rows of {own}; known: auto, {FP8}")


class RawWire:
    """Rows in the model's dtype, without encoding."""

    lossy = False  # whether the format rounds

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = str(dtype).removeprefix("torch.")
        self._dtype = dtype

    def row_bytes(self, width: int) -> int:
        """Return the bytes of an encoded row of `width` elements."""
        return _aligned(width * self._dtype.itemsize)

    def encode(self, x_TD: Tensor) -> Tensor:
        """Encode rows as uint8 [T, B]. The result may share memory with x."""
        assert x_TD.dtype == self._dtype, (x_TD.dtype, self._dtype)
        rows_TB = bytes_of(x_TD)
        padding = self.row_bytes(x_TD.shape[1]) - rows_TB.shape[1]
        if padding:
            return torch.nn.functional.pad(rows_TB, (0, padding))
        is_aligned = rows_TB.storage_offset() % ALIGNMENT == 0
        return rows_TB if is_aligned else rows_TB.clone()

    def decode(self, rows_TB: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        """Decode rows to a contiguous [T, D] in `dtype`. The result may share their memory."""
        return rows_TB.view(self._dtype)[:, :width].to(dtype).contiguous()


class Fp8Wire:
    """Rows in fp8 (e4m3), followed by one fp32 scale per block of 128 elements.

    scale = max(largest magnitude of the block, 1e-4) / 448. Rows are padded with zeros to whole
    blocks. Infinities and NaNs become NaN and do not affect the scale of their block.
    """

    name = FP8
    lossy = True

    def row_bytes(self, width: int) -> int:
        blocks = -(-width // BLOCK)
        return _aligned(blocks * (BLOCK + 4))

    def encode(self, x_TD: Tensor) -> Tensor:
        out_TB = x_TD.new_zeros((x_TD.shape[0], self.row_bytes(x_TD.shape[1])), dtype=torch.uint8)
        for rows in _chunks(*x_TD.shape):
            self._encode(x_TD[rows], out_TB[rows])
        return out_TB

    def decode(self, rows_TB: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        out_TD = rows_TB.new_empty((rows_TB.shape[0], width), dtype=dtype)
        for rows in _chunks(*out_TD.shape):
            self._decode(rows_TB[rows], out_TD[rows])
        return out_TD

    def _encode(self, x_TD: Tensor, out_TB: Tensor) -> None:
        rows, width = x_TD.shape
        blocks = -(-width // BLOCK)
        x_Tbn = torch.nn.functional.pad(x_TD.float(), (0, blocks * BLOCK - width)).view(
            rows, blocks, BLOCK
        )
        not_finite_Tbn = ~x_Tbn.isfinite()
        amax_Tb = x_Tbn.abs().masked_fill_(not_finite_Tbn, 0).amax(2).clamp_(min=LEAST_AMAX)
        scale_Tb = amax_Tb / E4M3_MAX
        # Some versions of torch convert infinities to finite fp8 values.
        x_Tbn = x_Tbn.masked_fill(not_finite_Tbn, torch.nan)
        data_Tbn = (x_Tbn / scale_Tb[:, :, None]).to(torch.float8_e4m3fn)
        out_TB[:, : blocks * BLOCK] = data_Tbn.view(torch.uint8).flatten(1)
        out_TB[:, blocks * BLOCK : blocks * (BLOCK + 4)] = scale_Tb.view(torch.uint8)

    def _decode(self, rows_TB: Tensor, out_TD: Tensor) -> None:
        rows, width = out_TD.shape
        blocks = -(-width // BLOCK)
        data_Tbn = (
            rows_TB[:, : blocks * BLOCK]
            .contiguous()
            .view(torch.float8_e4m3fn)
            .view(rows, blocks, BLOCK)
        )
        scale_Tb = (
            rows_TB[:, blocks * BLOCK : blocks * (BLOCK + 4)].contiguous().view(torch.float32)
        )
        out_TD.copy_((data_Tbn.float() * scale_Tb[:, :, None]).flatten(1)[:, :width])


WireFormat = RawWire | Fp8Wire


def _chunks(rows: int, width: int) -> Iterator[slice]:
    """Split rows into slices of about CHUNK elements, to bound the memory of fp32 copies."""
    step = max(1, CHUNK // width)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def bytes_of(x_TN: Tensor) -> Tensor:
    """View x as uint8 [T, N * itemsize]; copies x only if it is not contiguous."""
    if not x_TN.numel():  # an empty tensor may have strides that cannot be viewed
        return x_TN.new_empty((x_TN.shape[0], x_TN.shape[1] * x_TN.itemsize), dtype=torch.uint8)
    return x_TN.contiguous().view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
