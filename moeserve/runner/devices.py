"""The registry of devices. Plugins add devices by entry points of "moeserve.devices".

An entry is a subclass of `ModelRunnerBase` (runner/base.py lists what it overrides). This module
does not import torch, because settings are checked without it.
"""

from typing import TYPE_CHECKING

from moeserve.plugins import Registry

if TYPE_CHECKING:
    from moeserve.runner.base import ModelRunnerBase

DEVICES: "Registry[type[ModelRunnerBase]]" = Registry(
    "moeserve.devices",
    {
        "cpu": "moeserve.runner.cpu:CPUModelRunner",
        "cuda": "moeserve.runner.gpu:GPUModelRunner",
    },
    reserved=("auto",),
)


def check_device(name: str) -> None:
    """Raise ConfigError unless `name` is a value of the setting `device`."""
    DEVICES.check(name, "device", ("auto", *DEVICES.built_in))
