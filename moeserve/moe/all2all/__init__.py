"""The all-to-all backends, one file per transport: they send token activations to the ranks that
hold their experts, and the results back. `local` (one rank) is the specification of the others.
"""
