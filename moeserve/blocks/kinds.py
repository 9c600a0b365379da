"""The registry of mixers: class name of a specification -> layer class that computes it.

Layer classes import torch, so they are imported when a model is built.
"""

from typing import Protocol

from moeserve.blocks.build import Builder
from moeserve.blocks.mixer import Mixer, MixerLayer
from moeserve.plugins import Registry


class LayerClass(Protocol):
    """A class that implements `MixerLayer`."""

    def __call__(self, spec: Mixer, build: Builder, name: str, group: int) -> MixerLayer:
        """Build a layer; see `build_mixer`."""

    def workspace(
        self, spec: Mixer, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""


MIXERS: Registry[LayerClass] = Registry(
    "moeserve.mixers",
    {
        "Attention": "moeserve.blocks.attention_layer:AttentionLayer",
        "GatedDelta": "moeserve.blocks.gated_delta_layer:GatedDeltaLayer",
        "KimiDelta": "moeserve.blocks.kda_layer:KimiDeltaLayer",
        "LatentAttention": "moeserve.blocks.latent_attention_layer:LatentAttentionLayer",
        "Lightning": "moeserve.blocks.lightning_layer:LightningLayer",
        "Mamba1": "moeserve.blocks.mamba1_layer:Mamba1Layer",
        "Mamba2": "moeserve.blocks.mamba2_layer:Mamba2Layer",
        "ShortConv": "moeserve.blocks.short_conv_layer:ShortConvLayer",
    },
)


def build_mixer(spec: Mixer, build: Builder, name: str, group: int) -> MixerLayer:
    """Build the layer of a mixer. name: prefix of its parameters. group: its KV group."""
    return MIXERS[type(spec).__name__](spec, build, name, group)


def mixer_workspace(
    spec: Mixer, *, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
) -> int:
    """Return an upper bound of the bytes that a call needs in addition to the residual stream.

    width: the width of the model.
    tokens: the number of tokens of a step, including padding.
    max_len: the length of the longest context in tokens.
    itemsize: bytes of an element.
    """
    layer = MIXERS[type(spec).__name__]
    return layer.workspace(spec, width, tokens, max_len, itemsize, tp_size)
