"""A Hugging Face directory -> this rank's weights, packed for its kernels."""
