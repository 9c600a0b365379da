"""Encodes a plan for the other processes of an engine, which execute the same plans as its leader."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from moeserve.engine.plan import StepPlan


def _pack(value: Any) -> tuple[str, bytes]:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(type(value).__name__)
    return value.dtype.str, value.tobytes()


def _unpack(_: type, packed: Any) -> Any:
    array = np.frombuffer(packed[1], packed[0])
    return array.astype(array.dtype.newbyteorder("="))  # a copy: torch wants memory that it may write to


_encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
_decode = msgspec.msgpack.Decoder(StepPlan, dec_hook=_unpack).decode


def encode_plan(plan: StepPlan) -> bytes:
    """Returns the plan as msgpack for `decode_plan`."""
    return _encode(plan)


def decode_plan(data: bytes) -> StepPlan:
    """Returns the plan that `encode_plan` encoded. Raises ValueError for other bytes."""
    return _decode(data)
