"""Routing, all2all backends, expert kernels, micro-batches, and the MoE layer that joins them."""
