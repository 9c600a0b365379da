"""The layer class that computes each kind of mixer, by the class name of its numbers.

A `Mixer` (its numbers) has no torch; its layer class does, so it is imported when a model is built.
"""

from typing import Protocol

from moeserve.blocks.build import Builder
from moeserve.blocks.mixer import Mixer, MixerLayer
from moeserve.plugins import Registry


class LayerClass(Protocol):
    """A class of `MixerLayer`s."""

    def __call__(self, spec: Mixer, build: Builder, name: str, group: int) -> MixerLayer:
        """Build a layer of the parameters `name` + ...; group: its KV group."""

    def workspace(
        self, spec: Mixer, width: int, tokens: int, max_len: int, size: int, tp_size: int
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
    """Build a mixer of the parameters whose names begin with `name`. group: its KV group."""
    return MIXERS[type(spec).__name__](spec, build, name, group)


def mixer_workspace(
    spec: Mixer, *, width: int, tokens: int, max_len: int, size: int, tp_size: int
) -> int:
    """Return an upper bound of the bytes that a call needs beside the residual stream.

    width: of the model.
    tokens: of a step, padding included.
    max_len: the longest context.
    size: bytes of an element.
    """
    layer = MIXERS[type(spec).__name__]
    return layer.workspace(spec, width, tokens, max_len, size, tp_size)
