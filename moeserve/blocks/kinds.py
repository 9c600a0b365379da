"""The registries of mixers and connections: class name of a specification -> class that computes
it.

Layer classes import torch, so they are imported when a model is built.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from moeserve.blocks.build import Builder
from moeserve.blocks.mixer import Mixer, MixerLayer
from moeserve.blocks.residual import ResidualConnection
from moeserve.plugins import Registry

if TYPE_CHECKING:
    from moeserve.blocks.residual_layer import ConnectionLayer


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
        "BlockSparseAttention": (
            "moeserve.blocks.block_sparse_attention_layer:BlockSparseAttentionLayer"
        ),
        "ClippedAttention": "moeserve.blocks.clipped_attention_layer:ClippedAttentionLayer",
        "CompressedAttention": (
            "moeserve.blocks.compressed_attention_layer:CompressedAttentionLayer"
        ),
        "ConvolvedAttention": ("moeserve.blocks.convolved_attention_layer:ConvolvedAttentionLayer"),
        "ConvolvedHeads": "moeserve.blocks.convolved_attention_layer:ConvolvedHeadsLayer",
        "GatedDelta": "moeserve.blocks.gated_delta_layer:GatedDeltaLayer",
        "KimiDelta": "moeserve.blocks.kda_layer:KimiDeltaLayer",
        "GroupIndexedAttention": "moeserve.blocks.group_indexer_layer:GroupIndexedAttentionLayer",
        "LatentAttention": "moeserve.blocks.latent_attention_layer:LatentAttentionLayer",
        "Lightning": "moeserve.blocks.lightning_layer:LightningLayer",
        "Mamba1": "moeserve.blocks.mamba1_layer:Mamba1Layer",
        "Mamba2": "moeserve.blocks.mamba2_layer:Mamba2Layer",
        "NgramEmbedding": "moeserve.blocks.ngram_embedding_layer:NgramEmbeddingLayer",
        "MixtureOfAttention": (
            "moeserve.blocks.mixture_of_attention_layer:MixtureOfAttentionLayer"
        ),
        "OutputConv": "moeserve.blocks.output_conv_layer:OutputConvLayer",
        "RelativeAttention": "moeserve.blocks.relative_attention_layer:RelativeAttentionLayer",
        "SharedLatentAttention": (
            "moeserve.blocks.shared_latent_attention_layer:SharedLatentAttentionLayer"
        ),
        "SharedKeyAttention": "moeserve.blocks.compressed_attention_layer:SharedKeyAttentionLayer",
        "ShortConv": "moeserve.blocks.short_conv_layer:ShortConvLayer",
    },
)

# (specification, builder, prefix of the parameters' names) -> connection
CONNECTIONS: "Registry[Callable[[ResidualConnection, Builder, str], ConnectionLayer]]" = Registry(
    "moeserve.connections",
    {
        "AllStreams": "moeserve.blocks.gated_residual_layer:AllStreamsLayer",
        "GatedResidual": "moeserve.blocks.gated_residual_layer:GatedResidualLayer",
        "BlockResidual": "moeserve.blocks.block_residual_layer:BlockResidualLayer",
        "DelayedOutput": "moeserve.blocks.delayed_output_layer:DelayedOutputLayer",
        "HyperCollapse": "moeserve.blocks.hyper_connection_layer:HyperCollapseLayer",
        "HyperConnection": "moeserve.blocks.hyper_connection_layer:HyperConnectionLayer",
        "MeanCollapse": "moeserve.blocks.hyper_connection_layer:MeanCollapseLayer",
        "NormedResidual": "moeserve.blocks.normed_residual_layer:NormedResidualLayer",
        "HeldOutput": "moeserve.blocks.scaled_residual_layer:HeldOutputLayer",
        "ScaledResidual": "moeserve.blocks.scaled_residual_layer:ScaledResidualLayer",
        "Shortcut": "moeserve.blocks.shortcut_layer:ShortcutLayer",
    },
)


def build_mixer(spec: Mixer, build: Builder, name: str, group: int) -> MixerLayer:
    """Build the layer of a mixer. name: prefix of its parameters. group: its KV group."""
    return MIXERS[type(spec).__name__](spec, build, name, group)


def build_connection(
    spec: ResidualConnection | None, build: Builder, name: str
) -> "ConnectionLayer | None":
    """Build a connection, if there is one. name: prefix of its parameters."""
    return None if spec is None else CONNECTIONS[type(spec).__name__](spec, build, name)


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
