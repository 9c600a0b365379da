"""Models from a Hugging Face hub: their names, files, downloads and copies in the cache."""
