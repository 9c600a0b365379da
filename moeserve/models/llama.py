"""Llama (2, 3, 3.1 and what shares their shape): dense, with every kind of rotary scaling."""

from __future__ import annotations

from moeserve.models.family import Family

FAMILY = Family("LlamaForCausalLM")
