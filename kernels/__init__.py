"""Triton kernels, one family per file, imported as `moeserve.kernels`.

They import torch and triton, but nothing else of moeserve. Each kernel has a launcher with a worked
example in its docstring, and a plain-torch reference.

If TRITON_INTERPRET=1 is set before the first import of triton, kernels run on CPU tensors, slowly.
This is how they are tested without a GPU. The interpreter computes bfloat16 `tl.dot` wrongly.
"""
