"""Triton kernels, one family per file, imported as `moeserve.kernels`.

They import torch and triton, and nothing of moeserve. Each kernel has a docstring with a worked
example, a plain-torch reference and a launcher.

With TRITON_INTERPRET=1 set before the first import of triton, kernels run on CPU tensors, slowly.
This is how they are tested without a GPU. The interpreter computes bfloat16 `tl.dot` wrongly.
"""
