"""Triton kernels, one family per file; imported as `moeserve.kernels`. They know torch and triton,
nothing of moeserve.

Each has a docstring with a worked example, a plain-torch reference and a launcher. With
TRITON_INTERPRET=1 set before the first import of triton they run on CPU tensors, slowly: so they
are tested without a GPU (not bfloat16 `tl.dot`, which the interpreter computes wrongly).
"""
