"""The layer class that computes each kind of mixer.

A `Mixer` (its numbers) has no torch; its layer class does, so it is imported when a model is built.
"""

from pkgutil import resolve_name
from typing import Protocol

from moeserve.blocks.build import Builder
from moeserve.blocks.mixer import Mixer, MixerLayer

LAYERS = {
    "Attention": "moeserve.blocks.attention_layer:AttentionLayer",
    "GatedDelta": "moeserve.blocks.gated_delta_layer:GatedDeltaLayer",
    "KimiDelta": "moeserve.blocks.kda_layer:KimiDeltaLayer",
    "LatentAttention": "moeserve.blocks.latent_attention_layer:LatentAttentionLayer",
    "Lightning": "moeserve.blocks.lightning_layer:LightningLayer",
    "Mamba1": "moeserve.blocks.mamba1_layer:Mamba1Layer",
    "Mamba2": "moeserve.blocks.mamba2_layer:Mamba2Layer",
    "ShortConv": "moeserve.blocks.short_conv_layer:ShortConvLayer",
}


class LayerClass(Protocol):
    """A class of `MixerLayer`s."""

    def __call__(self, spec: Mixer, build: Builder, name: str, group: int) -> MixerLayer:
        """Build a layer of the parameters `name` + ...; group: its KV group."""

    def workspace(
        self, spec: Mixer, width: int, tokens: int, max_len: int, size: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""


def layer_class(spec: Mixer) -> LayerClass:
    """Return the class that computes mixers of this kind."""
    found: LayerClass = resolve_name(LAYERS[type(spec).__name__])
    return found


def build_mixer(spec: Mixer, build: Builder, name: str, group: int) -> MixerLayer:
    """Build a mixer of the parameters whose names begin with `name`. group: its KV group."""
    return layer_class(spec)(spec, build, name, group)


def mixer_workspace(
    spec: Mixer, *, width: int, tokens: int, max_len: int, size: int, tp_size: int
) -> int:
    """Return an upper bound of the bytes that a call needs beside the residual stream.

    width: of the model.
    tokens: of a step, padding included.
    max_len: the longest context.
    size: bytes of an element.
    """
    return layer_class(spec).workspace(spec, width, tokens, max_len, size, tp_size)
