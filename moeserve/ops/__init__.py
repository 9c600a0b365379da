"""Kernels: a Python function for each, its reference in plain torch, and the table of all (Ops)."""
