"""One file per model family, saying only what is special about it."""
