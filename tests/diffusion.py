"""Small checkpoints of models that decode blocks, and a plain loop over transformers' model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import write_checkpoint

MASK = 7
THRESHOLD = 0.95


class DiffusionCheckpoint(NamedTuple):
    path: Path
    reference: Any  # transformers' causal model with the same weights, fp32
    block: int


# Family -> (family of tests/families.py with the same weights, changes of config.json)
DIFFUSION: dict[str, tuple[str, dict[str, Any]]] = {
    "sdar_moe": (
        "qwen3_moe",
        {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "block_size": 4},
    ),
    "llada2_moe": (
        "bailing_moe",
        {
            "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "block_size": 16,
            "use_sliding_window": False, "sliding_window": 4096,
        },
    ),
}  # fmt: skip


def write_diffusion(name: str, path: Path, sharpness: float = 12.0) -> DiffusionCheckpoint:
    """Write a checkpoint to `path`.

    sharpness: factor of logits, so that some tokens are more probable than the threshold.
    """
    base, changes = DIFFUSION[name]
    reference = write_checkpoint(base, path).reference
    with torch.no_grad():
        reference.lm_head.weight.mul_(sharpness)
    weights_file = path / "model.safetensors"
    tensors = load_file(weights_file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * sharpness
    save_file(tensors, weights_file)
    config_file = path / "config.json"
    config = json.loads(config_file.read_text()) | changes | {"mask_token_id": MASK}
    config_file.write_text(json.dumps(config))
    return DiffusionCheckpoint(path, reference, changes["block_size"])


def block_logits(reference: Any, ids: Sequence[int], block: int) -> Tensor:
    """Return the logits [T, V] of tokens that see all earlier tokens and their whole block."""
    blocks_T = torch.arange(len(ids)) // block
    is_seen_TT = blocks_T[None] <= blocks_T[:, None]
    mask_TT = torch.zeros(is_seen_TT.shape).masked_fill_(~is_seen_TT, torch.finfo().min)
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([ids]), attention_mask=mask_TT[None, None]).logits
    return logits[0]


def decode_blocks(
    reference: Any, prompt: Sequence[int], max_tokens: int, block: int, stops: Sequence[int] = ()
) -> tuple[list[int], list[int]]:
    """Return the answer, and the number of rounds of each of its blocks, without any cache."""
    tokens = list(prompt)
    rounds = []
    while len(tokens) < len(prompt) + max_tokens:
        masked = set(range(len(tokens), (len(tokens) // block + 1) * block))
        tokens += [MASK] * len(masked)
        rounds.append(0)
        while masked:
            rounds[-1] += 1
            logits_TV = block_logits(reference, tokens, block)
            probabilities_TV = logits_TV.softmax(-1)
            logits_TV[:, MASK] = -torch.inf
            best_T = logits_TV.argmax(-1)
            confidence = {i: float(probabilities_TV[i, best_T[i]]) for i in sorted(masked)}
            sure = [i for i in confidence if confidence[i] > THRESHOLD]
            for i in sure or [max(confidence, key=lambda i: confidence[i])]:
                tokens[i] = int(best_T[i])
                masked.remove(i)
        answer = tokens[len(prompt) :]
        if ends := [i for i, token in enumerate(answer) if token in stops]:
            return answer[: min(ends[0] + 1, max_tokens)], rounds
    return tokens[len(prompt) :][:max_tokens], rounds
