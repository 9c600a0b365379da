"""Compute all drafts of an MTP head in one native call, in a thread in parallel to the host.

The call does not need the GIL, so the host can process the step's result and plan the next step in
the meantime (csrc/bindings/draft_head.cpp). The drafts are those of `ModelProposer`, unless two
tokens are so close that the rounding of fp32 logarithms decides between them.
"""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch

from moeserve.blocks.attention_layer import AttentionLayer
from moeserve.blocks.feed_forward_layer import DenseLayer
from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.engine.plan import I32
from moeserve.models.decoder import Decoder
from moeserve.models.mtp import Merge
from moeserve.ops.inputs import LayerCache
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.native_rows import KV_TYPES, TYPES
from moeserve.runner.sampling.native import UNSUPPORTED, NativeSampler
from moeserve.runner.sampling.rows import Trait
from moeserve.runner.sampling.sampler import Sampler
from moeserve.runner.speculation.base import Verified
from moeserve.runner.tables import I64, Tables


class NativeHead:
    """Native drafting with a head, its KV cache and the request tables.

    None of these may move in memory, because native code keeps their addresses.
    """

    def __init__(
        self,
        head: Decoder,
        cache: LayerCache,
        rule: KVRule,
        groups: Sequence[KVGroup],
        tables: Tables,
        sampler: NativeSampler,
    ) -> None:
        module: Any = native()
        (layer,) = head.layers
        k_cache, v_cache = cache
        merge = head.merge
        mixer = layer.mixer
        dense = layer.feed_forward
        assert isinstance(merge, Merge)
        assert isinstance(mixer, AttentionLayer)
        assert isinstance(dense, DenseLayer)
        assert head.norm is not None
        mlp = dense.mlp
        attention: Any = mixer.fused_call  # native, because `_is_plain` has checked it
        mlp_call: Any = mlp.fused_call
        norms: Any = (
            merge.embed_norm,
            merge.hidden_norm,
            layer.attn_norm,
            layer.mlp_norm,
            head.norm,
        )
        rotary = mixer.prepare.rotary
        shape = mixer.prepare.shape
        rows = sampler.rows
        full_group = next(i for i, group in enumerate(groups) if group.rule == FULL)
        blocks = tables.blocks[full_group]
        logits = head.head
        product = merge.product.part
        weights = module.HeadWeights(
            type=TYPES[head.embed_VD.dtype], eps=head.norm.eps,
            norms=[norm.weight_D.data_ptr() for norm in norms],
            embedding=head.embed_VD.data_ptr(), merge=matrix(product), attention=attention.native,
            gate_up=matrix(mlp.gate_up), down=matrix(mlp.down.part), activation=mlp_call.native,
            logits=matrix(logits), cos=rotary.cos.data_ptr(), sin=rotary.sin.data_ptr(),
            rotates=len(rotary.cos) > 1,
        )  # fmt: skip
        columns = rows.traits, rows.temperature, rows.seed
        head_tables = module.HeadTables(
            tokens=tables.arena.data_ptr(), width=tables.width, blocks=blocks.data_ptr(),
            max_blocks=blocks.shape[1],
            block_size=groups[full_group].block_size, window=rule.window, section=rule.chunk,
            heads=list(astuple(shape)), k=k_cache.data_ptr(),
            v=v_cache.data_ptr(), kv_type=KV_TYPES[k_cache.dtype],
            columns=[column.ctypes.data for column in columns],
            token_hash=sampler.gumbel.token_hash.data_ptr(), random=Trait.RANDOM,
        )  # fmt: skip
        self._rows = rows
        self._slots = np.zeros(0, np.int64)
        self._native = module.DraftHead(weights, head_tables, keep=(head, cache, tables, sampler))

    def start(self, step: Verified, num_drafts: int) -> bool:
        """Start to read a step and to draft tokens. Return False if a request needs more than the
        native call supports.
        """
        if len(self._rows.having(UNSUPPORTED, step.slots_S)):
            return False
        plan = step.plan
        hidden = step.hidden_TD
        self._slots = step.slots_S if plan.propose else step.slots_S[:0]
        self._native.start(
            slots=plan.slots_R, starts=plan.starts_R, offsets=step.rows.offsets_R1,
            last=step.last_S.numpy(),
            hidden=hidden.data_ptr(), stride=hidden.stride(0), keep=hidden,
            num_drafts=num_drafts * plan.propose,
        )  # fmt: skip
        return True

    def wait(self) -> tuple[I64, I32]:
        """Wait for the last started step. Return its slots, and their drafts [S, num_drafts]."""
        drafts: I32 = self._native.wait()
        slots = self._slots
        self._slots = self._slots[:0]
        return slots, drafts.reshape(len(slots), -1) if len(slots) else drafts


def matrix(linear: Any) -> Any:
    """Return the native object of a packed linear layer."""
    assert isinstance(linear, NativeLinear)
    return linear.matrix


def native_head(
    model: object,
    caches: Sequence[LayerCache],
    rules: Sequence[KVRule],
    groups: Sequence[KVGroup],
    tables: Tables,
    sampler: Sampler,
) -> NativeHead | None:
    """Return the native head for a draft model; None if it is not supported.

    Supported is an MTP head with one dense layer, native attention and MLP blocks, plain norms and
    plain logits, without tensor parallelism. Arguments are as for `ModelProposer`.
    """
    if not (
        isinstance(model, Decoder)
        and isinstance(model.merge, Merge)
        and isinstance(sampler, NativeSampler)
    ):
        return None
    return (
        NativeHead(model, caches[0], rules[0], groups, tables, sampler)
        if _is_plain(model, model.merge)
        else None
    )


def _is_plain(head: Decoder, merge: Merge) -> bool:
    spec = head.spec
    (layer,) = head.layers
    mixer = layer.mixer
    dense = layer.feed_forward
    norms = merge.embed_norm, merge.hidden_norm, layer.attn_norm, layer.mlp_norm, head.norm
    return (
        head.norm is not None
        and layer.attn_connection is None
        and head.embed_VD.dtype in (torch.float32, torch.bfloat16)
        and head.embed_VD.is_contiguous()
        and (spec.embedding_scale, spec.residual_scale, spec.logits_divisor) == (1.0, 1.0, 1.0)
        and not spec.logits_cap
        and isinstance(head.head, NativeLinear)
        and isinstance(merge.product.part, NativeLinear)
        and merge.product.tp.size == 1
        and all(
            norm is not None and not norm.centred and norm.eps == head.norm.eps for norm in norms
        )
        and isinstance(mixer, AttentionLayer)
        and isinstance(dense, DenseLayer)
        and mixer.fused_call is not None
        and dense.mlp.fused_call is not None
        and (layer.attn_post_norm, layer.mlp_post_norm, layer.scale) == (None, None, None)
        and not (layer.parallel or layer.reads_stream)
    )
