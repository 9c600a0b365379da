"""How llama.cpp's converters write each family as GGUF, one module for each group of families.

`python -m tools.compare_gguf_converter` compares them with the converters.
"""
