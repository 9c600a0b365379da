"""Speculative decoding: the proposers of drafts, and the draft models."""
