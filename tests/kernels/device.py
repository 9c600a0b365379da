"""The device of kernel tests: a GPU if there is one, else the CPU with Triton's interpreter.

tests/conftest.py switches the interpreter on.
"""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
