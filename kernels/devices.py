"""Cached facts about a device: asking CUDA takes longer than a launch."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class DeviceFacts(NamedTuple):
    """name: as in tables of configurations."""

    name: str
    multiprocessors: int


@cache
def facts_of(device: torch.device) -> DeviceFacts:
    """Returns the device's name and number of multiprocessors. cpu -> ("cpu", 1)"""
    if device.type != "cuda":
        return DeviceFacts(device.type, 1)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.name, properties.multi_processor_count)
