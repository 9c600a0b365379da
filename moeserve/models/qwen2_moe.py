"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biased q, k and v, top-k weights as the softmax gave them, and a
shared expert for every token behind a sigmoid gate. Some layers may be dense."""

from __future__ import annotations

from moeserve.models.family import Family

FAMILY = Family("Qwen2MoeForCausalLM")
