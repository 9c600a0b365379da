"""Write moeserve/assets/gguf_grids.npz from the package `gguf`, which llama.cpp maintains.

    python tools/make_gguf_grids.py

An entry of a grid has the codes of 4 or 8 weights without their signs (see `IQ3_XXS_CODES` and the
others in moeserve/loader/stored_format.py).
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")
FILE = Path(__file__).parent.parent / "moeserve/assets/gguf_grids.npz"


def grid(name: str) -> np.ndarray:
    """Return a grid as codes, uint8 [entries, 4 or 8]."""
    quants = getattr(gguf.quants, name)
    quants.init_grid()
    numbers = quants.grid.reshape(quants.grid_shape)
    codes = np.zeros(numbers.shape, np.uint8)
    for code, number in enumerate(quants.grid_map):
        codes[numbers == number] = code
    return codes


if __name__ == "__main__":
    grids: dict[str, Any] = {name.lower(): grid(name) for name in GRIDS}
    np.savez_compressed(FILE, **grids)
    print(f"{FILE}: {FILE.stat().st_size} bytes")
