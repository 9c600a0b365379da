"""The format of a row while it travels: its own dtype, or fp8 with a scale for every 128 elements.

T rows of D elements; B bytes of one row on the wire. Whatever the format, the bytes of a row depend
on that row alone. A format that rounds applies to every row, also to those that stay on their rank:
otherwise the bits of a request would depend on where its experts are.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moeserve.errors import ConfigError

# bytes that a row's length is a multiple of, so that rows can be moved and viewed in wide elements
ALIGNMENT = 16
BLOCK = 128  # elements that share a scale
E4M3_MAX = 448.0
LEAST_AMAX = 1e-4
CHUNK = 1 << 20  # elements that are converted at once
RAW = ("float32", "bfloat16", "float16")
FP8 = "fp8_b128"


def wire_of(name: str, dtype: torch.dtype) -> "WireFormat":
    """Return the format called `name`; "auto" is the rows' own dtype. Raises ConfigError for an
    unknown name.
    """
    own = str(dtype).removeprefix("torch.")
    if name in ("auto", own) and own in RAW:
        return RawWire(dtype)
    if name == FP8:
        return Fp8Wire()
    raise ConfigError(f"no wire format {name!r} for rows of {own}; known: auto, {FP8}")


class RawWire:
    """The elements as they are. name: the dtype, or the name of a format that rounds. lossy:
    whether it rounds.
    """

    lossy = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = str(dtype).removeprefix("torch.")
        self._dtype = dtype

    def row_bytes(self, width: int) -> int:
        """Return B for rows of `width` elements."""
        return _aligned(width * self._dtype.itemsize)

    def encode(self, x_TD: Tensor) -> Tensor:
        """Return uint8 [T, B], which may share x's memory."""
        assert x_TD.dtype == self._dtype, (x_TD.dtype, self._dtype)
        rows_TB = bytes_of(x_TD)
        missing = self.row_bytes(x_TD.shape[1]) - rows_TB.shape[1]
        if missing:
            return torch.nn.functional.pad(rows_TB, (0, missing))
        return rows_TB.clone() if rows_TB.storage_offset() % ALIGNMENT else rows_TB

    def decode(self, rows_TB: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        """Return [T, D] in `dtype`, contiguous, which may share the rows' memory."""
        return rows_TB.view(self._dtype)[:, :width].to(dtype).contiguous()


class Fp8Wire:
    """e4m3 elements, then one fp32 scale per block of 128: max(largest magnitude, 1e-4) / 448.

    The width is filled up to whole blocks with zeros. An element that is not finite arrives as NaN
    and leaves its neighbours unharmed.
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
        x_TbB = torch.nn.functional.pad(x_TD.float(), (0, blocks * BLOCK - width)).view(
            rows, blocks, BLOCK
        )
        odd_TbB = ~x_TbB.isfinite()
        scale_Tb = x_TbB.abs().masked_fill_(odd_TbB, 0).amax(2).clamp_(min=LEAST_AMAX) / E4M3_MAX
        x_TbB = x_TbB.masked_fill(
            odd_TbB, torch.nan
        )  # some versions of torch make infinities finite
        data_TbB = (x_TbB / scale_Tb[:, :, None]).to(torch.float8_e4m3fn)
        out_TB[:, : blocks * BLOCK] = data_TbB.view(torch.uint8).flatten(1)
        out_TB[:, blocks * BLOCK : blocks * (BLOCK + 4)] = scale_Tb.view(torch.uint8)

    def _decode(self, rows_TB: Tensor, out_TD: Tensor) -> None:
        rows, width = out_TD.shape
        blocks = -(-width // BLOCK)
        data_TbB = (
            rows_TB[:, : blocks * BLOCK]
            .contiguous()
            .view(torch.float8_e4m3fn)
            .view(rows, blocks, BLOCK)
        )
        scale_Tb = (
            rows_TB[:, blocks * BLOCK : blocks * (BLOCK + 4)].contiguous().view(torch.float32)
        )
        out_TD.copy_((data_TbB.float() * scale_Tb[:, :, None]).flatten(1)[:, :width])


WireFormat = RawWire | Fp8Wire


def _chunks(rows: int, width: int) -> Iterator[slice]:
    """Few rows at a time: in fp32 all of them would take several times their memory."""
    each = max(1, CHUNK // width)
    return (slice(start, min(start + each, rows)) for start in range(0, rows, each))


def bytes_of(x_TN: Tensor) -> Tensor:
    """Return uint8 [T, N * itemsize]; shares x's memory where that is possible."""
    if not x_TN.numel():  # its strides may be anything
        return x_TN.new_empty((x_TN.shape[0], x_TN.shape[1] * x_TN.itemsize), dtype=torch.uint8)
    return x_TN.contiguous().view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
