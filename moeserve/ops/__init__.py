"""One Python function per kernel, its plain-torch reference, and the one table that picks
implementations at start.
"""
