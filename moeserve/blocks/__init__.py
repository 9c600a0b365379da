"""The building blocks of models: attention and other mixers, feed-forward blocks, norms, linear."""
