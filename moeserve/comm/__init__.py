"""Ranks and how they agree on a step."""
