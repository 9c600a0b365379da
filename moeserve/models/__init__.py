"""The model families, one file each, and the code that they share: config.json is read into a
ModelSpec, weights are loaded, and a Decoder is built from them.
"""
