"""OLMoE (OLMoE-1B-7B): queries and keys are normalised over all heads together; then q, k and v may be clipped."""

from __future__ import annotations

from moeserve.models.family import Family

FAMILY = Family("OlmoeForCausalLM")
