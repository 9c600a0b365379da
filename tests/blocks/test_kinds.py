"""Each kind of mixer has a layer class; a package can add a kind."""

from __future__ import annotations

import inspect
from pkgutil import iter_modules

import moeserve.blocks
from moeserve.blocks.kinds import MIXERS
from moeserve.blocks.mixer import Mixer
from tests.plugin_packages import Install

ECHO = """
from moeserve.blocks.mixer import CacheTensor, Mixer

class Echo(Mixer):
    def cache(self, tp_size):
        return ()

    def products(self, width):
        return []

    def plan(self, plan, param_prefix, tensor_prefix):
        pass

class EchoLayer:
    def __init__(self, spec, build, name, group):
        self.made_of = spec, build, name, group

    @staticmethod
    def workspace(spec, width, tokens, max_len, size, tp_size):
        return width * tokens * size
"""


def kinds(base: type) -> set[str]:
    found = set()
    for kind in base.__subclasses__():
        found |= kinds(kind) | (set() if inspect.isabstract(kind) else {kind.__name__})
    return found


def test_every_mixer_has_a_layer_class() -> None:
    for module in iter_modules(moeserve.blocks.__path__, "moeserve.blocks."):
        __import__(module.name)
    ours = {kind for kind in kinds(Mixer) if kind != "Echo"}
    assert set(MIXERS.built_in) == ours
    for name in ours:
        assert MIXERS[name].__name__ == f"{name}Layer"


def test_a_package_adds_a_kind(install: Install) -> None:
    from moeserve.blocks.kinds import build_mixer, mixer_workspace

    install("echo", {"moeserve.mixers": {"Echo": "echo_mixer:EchoLayer"}}, {"echo_mixer.py": ECHO})
    import echo_mixer

    spec = echo_mixer.Echo(rope=None)
    build: object = object()
    assert build_mixer(spec, build, "layers.0.", 3).made_of == (spec, build, "layers.0.", 3)
    sizes = {"width": 8, "tokens": 4, "max_len": 9, "itemsize": 2, "tp_size": 1}
    assert mixer_workspace(spec, **sizes) == 64
