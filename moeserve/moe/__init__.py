"""The MoE layer, and its parts: routing, all-to-all backends, expert kernels, micro-batches."""
