"""Fixtures that tests of several folders share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.checkpoints import FAMILIES, SMALL, Checkpoint, randomise

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Where many small products, or ranks as threads, would only wait for torch's pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """make_checkpoint(family, **config overrides): written once per session and combination."""
    made: dict[str, Checkpoint] = {}

    def make(name: str, **overrides: Any) -> Checkpoint:
        key = f"{name}-{sorted(overrides.items())}"
        if key not in made:
            import torch
            import transformers  # slow to import: only where a checkpoint is written

            class_name, extra = FAMILIES[name]
            config = getattr(transformers, class_name + "Config")(**{**SMALL, **extra, **overrides})
            torch.manual_seed(sum(name.encode()))
            model = getattr(transformers, class_name + "ForCausalLM")(config).eval()
            randomise(model)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[key] = Checkpoint(path, model)
        return made[key]

    return make
