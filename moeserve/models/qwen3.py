"""Qwen3 (dense, 0.6B to 32B): norms on each query and key head."""

from __future__ import annotations

from moeserve.models.family import Family

FAMILY = Family("Qwen3ForCausalLM")
