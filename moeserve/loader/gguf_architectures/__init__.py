"""The GGUF architectures that can be read, one module for each group of families."""
