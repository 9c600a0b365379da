"""Routing, all2all backends, expert kernels, lanes, and the MoE layer that joins them."""
