"""The table of checkpoints: transformers reads each as it is written, and computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.families import ARCHITECTURES, FAMILIES

# transformers sets the bias of ZAYA's empty expert to -1 after it has read the checkpoint's.
NOT_READ = {"zaya", *ARCHITECTURES}


@pytest.mark.full("models", keep=4)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_READ])
def test_transformers_reads_the_checkpoint(name: str, make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint(name)
    prompt = torch.randint(0, 250, (1, 150), generator=torch.Generator().manual_seed(1))
    again = type(checkpoint.reference).from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    with torch.no_grad():
        ours = checkpoint.reference(prompt).logits
        theirs = again(prompt).logits
    assert torch.equal(ours, theirs)
    assert len(set(ours[0].argmax(-1).tolist())) > 20
