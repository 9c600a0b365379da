"""Backends that carry rows to their experts and back: one file per transport; `local` is the
specification.
"""
