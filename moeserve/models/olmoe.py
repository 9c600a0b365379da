"""OLMoE (OLMoE-1B-7B): queries and keys are normalised over all heads together, optionally clipped before that."""

from __future__ import annotations

from moeserve.models.family import Family

FAMILY = Family("OlmoeForCausalLM")
