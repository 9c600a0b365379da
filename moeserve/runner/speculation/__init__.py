"""Proposers of drafts."""
