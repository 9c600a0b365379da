"""Where kernel tests run: on a GPU if there is one, else interpreted on the CPU (tests/conftest.py
sees to that).
"""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
