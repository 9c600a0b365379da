"""Proposers of drafts, and where drafts meet the step."""
