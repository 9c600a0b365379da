"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): norms on each query and key head, softmax top-k weights renormalised.

Some layers may be dense (`mlp_only_layers`, `decoder_sparse_step`).
"""

from __future__ import annotations

from moeserve.models.family import Family

FAMILY = Family("Qwen3MoeForCausalLM")
