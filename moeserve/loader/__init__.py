"""Loading a model: from checkpoint files to this rank's weights, packed for its kernels."""
