"""Only blocks and kernels depend on the kind of a mixer.

Another kind (latent, linear) needs changes nowhere else.
"""

from __future__ import annotations

import re
from pathlib import Path

import moeserve

ROOT = Path(moeserve.__file__).parent
# Config readers, and what times kernels.
KNOWING = (
    "blocks/",
    "ops/",
    "models/",
    "loader/gguf_architectures/",
    "loader/gguf_config.py",
    "loader/gguf_layers.py",
    "cli/tune.py",
    "plan/tables.py",
    "plan/roofline.py",
)
BUILDING = ("build", "decoder", "load_plan", "registry", "spec", "workspace")


def test_nothing_else_knows_heads() -> None:
    building = {f"models/{name}.py" for name in BUILDING}
    files = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py")}
    assert building < files.keys()
    outside = [name for name in files if name in building or not name.startswith(KNOWING)]
    word = re.compile(r"\b(num_(kv_)?heads|num_key_value_heads|head_dim)\b")
    assert [name for name in outside if word.search(files[name].read_text())] == []
