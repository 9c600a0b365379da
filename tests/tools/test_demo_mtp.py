"""The demo model's MTP head: how it is trained, written and measured, and how often the shipped one
is right.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moeserve.loader.checkpoint import open_checkpoint
from tools.demo_corpus import documents
from tools.demo_export import export, export_mtp, load, mtp_tensors, tensors
from tools.demo_model import DemoModel, Groups, Shape
from tools.demo_mtp import Distillation, MTPHead, guesses, matches, tokens_a_step
from tools.train_demo import IGNORE, batch_at, encode, optimizers
from tools.train_demo_mtp import prompt

DEMO = Path(__file__).parents[2] / "moeserve" / "assets" / "demo"
TINY = Shape(
    vocab=32,
    hidden=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    experts=2,
    expert_hidden=16,
    max_positions=32,
)


@pytest.fixture
def tiny() -> tuple[DemoModel, MTPHead]:
    torch.manual_seed(0)
    model = DemoModel(TINY, torch.float32).requires_grad_(False)
    model.embed.normal_()
    return model, MTPHead(TINY, width=24)


def rows(*lengths: int) -> tuple[torch.Tensor, torch.Tensor, Groups]:
    """Documents of 0, 1, 2, 0, 1, 2, ... whose first three tokens have no label."""
    docs = []
    for length in lengths:
        ids = np.arange(length, dtype=np.int16) % 3
        docs.append((ids, np.where(np.arange(length) < 3, IGNORE, ids).astype(np.int16)))
    return batch_at(docs, list(range(len(docs))))


def test_a_step_is_what_the_head_makes_of_its_own_last_state(
    tiny: tuple[DemoModel, MTPHead],
) -> None:
    model, head = tiny
    ids = torch.randint(32, (2, 12))
    hidden = torch.randn(2, 12, 16)
    first, second, third = head(ids, hidden, model.embed, 3)
    for p in (0, 4, 8):
        alone = hidden.clone()
        alone[:, p + 1] = first[:, p]
        torch.testing.assert_close(head(ids, alone, model.embed, 1)[0][:, p + 1], second[:, p])
        alone[:, p + 2] = second[:, p]
        torch.testing.assert_close(head(ids, alone, model.embed, 1)[0][:, p + 2], third[:, p])


def test_a_guess_stands_where_the_model_says_the_same_token(
    tiny: tuple[DemoModel, MTPHead],
) -> None:
    model, head = tiny
    ids, labels, groups = rows(12, 12, 9)
    found, hidden, kept = guesses(model, head, ids, labels, groups, 2)
    assert kept.tolist() == labels[(labels >= 0).nonzero().squeeze(1)].tolist()
    state = model.hidden(ids, groups)[0]
    assert groups[0] == (2, 11)
    made = head(ids[:22].view(2, 11), state[:22].view(2, 11, 16), model.embed, 2)
    torch.testing.assert_close(hidden[:9], state[2:11])
    torch.testing.assert_close(
        found[0, 0], made[0][0, 1]
    )  # of the token before, for the first that has a label
    torch.testing.assert_close(found[1, 0], made[1][0, 0])


def test_training_brings_the_head_closer_to_the_model(tiny: tuple[DemoModel, MTPHead]) -> None:
    model, head = tiny
    before = {name: p.clone() for name, p in model.named_parameters()}
    losses = []
    opts = optimizers(head, 0.02)
    for _ in range(8):
        made, hidden, _ = guesses(model, head, *rows(12, 12, 9), 3)
        each = Distillation.apply(made, hidden, model.embed, 0.8, 4)
        each.sum().backward()
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        losses.append(each.detach())
    assert (losses[-1] < 0.7 * losses[0]).all(), losses
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_the_loss_is_torchs_kl_divergence() -> None:
    torch.manual_seed(0)
    guess = torch.randn(2, 7, 4, requires_grad=True)
    hidden = torch.randn(7, 4)
    embed = torch.randn(9, 4)
    wanted = (hidden @ embed.T / 0.8).log_softmax(-1)
    logs = [(x @ embed.T / 0.8).log_softmax(-1) for x in guess]
    plain = torch.stack(
        [
            torch.nn.functional.kl_div(x, wanted, reduction="batchmean", log_target=True)
            for x in logs
        ]
    )
    (theirs,) = torch.autograd.grad((plain * torch.tensor([1.0, 2.0])).sum(), guess)
    ours = Distillation.apply(guess, hidden, embed, 0.8, 3)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad((ours * torch.tensor([1.0, 2.0])).sum(), guess)[0], theirs
    )


@pytest.mark.parametrize("temperature", [1e-5, 0.8])
def test_matches_are_those_of_two_samplings_with_one_noise(temperature: float) -> None:
    noise = torch.Generator().manual_seed(1)
    embed = torch.eye(4)
    count = 20_000
    hidden = torch.tensor([1.0, 0.5, 0.0, -1.0])
    guess = torch.tensor([0.8, 0.9, 0.1, -0.5])
    gumbel = -torch.empty(count, 4).exponential_(generator=noise).log()
    labels, others = ((x / temperature + gumbel).argmax(-1) for x in (hidden, guess))
    both = torch.stack([hidden, guess])[:, None].expand(2, count, 4)
    found = matches(both, both[0], labels, embed, temperature, noise)
    assert found[0].all()
    assert found[1].float().mean().item() == pytest.approx(
        (labels == others).float().mean().item(), abs=0.015
    )


@pytest.mark.parametrize(
    ("found", "drafts", "steps"),
    [
        ([[0, 0, 0, 0], [1, 1, 1, 1]], 2, 4),
        ([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], 1, 3),
        ([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], 2, 2),
        ([[1, 0, 1, 0, 1, 1], [1, 0, 0, 1, 0, 1]], 2, 3),  # 0 1 | 2 3 4 | 5, which ends the text
    ],
)
def test_tokens_a_step(found: list[list[int]], drafts: int, steps: int) -> None:
    assert tokens_a_step(torch.tensor(found), drafts) == len(found[0]) / steps


def test_the_head_gets_a_file_of_its_own(tiny: tuple[DemoModel, MTPHead], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model, head = tiny
    export(tmp_path, model, Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    alone = (tmp_path / "model.safetensors").read_bytes()
    for _ in range(2):  # again, over the files of a first time
        export_mtp(tmp_path, head)
        assert (tmp_path / "model-00001-of-00002.safetensors").read_bytes() == alone
    assert not (tmp_path / "model.safetensors").exists()
    shapes = {
        name: list(t.shape)
        for name, t in load_file(tmp_path / "model-00002-of-00002.safetensors").items()
    }
    layer = {
        "input_layernorm": [16],
        "post_attention_layernorm": [16],
        "self_attn.q_norm": [8],
        "self_attn.k_norm": [8],
    }
    layer |= {
        "self_attn.q_proj": [16, 16],
        "self_attn.o_proj": [16, 16],
        "self_attn.k_proj": [8, 16],
    }
    layer |= {
        "self_attn.v_proj": [8, 16],
        "mlp.gate_proj": [24, 16],
        "mlp.up_proj": [24, 16],
        "mlp.down_proj": [16, 24],
    }
    top = {"fc": [16, 32], "norm": [16], "pre_fc_norm_embedding": [16], "pre_fc_norm_hidden": [16]}
    wanted = {f"mtp.layers.0.{name}.weight": shape for name, shape in layer.items()}
    assert shapes == wanted | {f"mtp.{name}.weight": shape for name, shape in top.items()}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["mtp_num_hidden_layers"], config["intermediate_size"]) == (1, 24)
    assert open_checkpoint(tmp_path).names == {*shapes, *tensors(model)}
    again = MTPHead(TINY, width=24)
    load(tmp_path, mtp_tensors(again))
    assert all(
        torch.equal(a, b.bfloat16())
        for a, b in zip(again.parameters(), head.parameters(), strict=True)
    )
    export(
        tmp_path, model, Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    )  # a new model: the head is not its own
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    assert "mtp_num_hidden_layers" not in json.loads((tmp_path / "config.json").read_text())


def test_the_shipped_head_mostly_says_what_the_model_says() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = DemoModel(Shape(), torch.float32)
    head = MTPHead(Shape())
    load(DEMO, tensors(model))
    load(DEMO, mtp_tensors(head))
    docs = [encode(tokenizer, doc, 1536) for doc in documents(1_000_002, 12)]
    with torch.no_grad():
        made, hidden, _ = guesses(model, head, *batch_at(docs, list(range(12))), 3)
        said, *guessed = ((x @ model.embed.T).argmax(-1) for x in (hidden, *made))
    kept = [(said == guess).float().mean().item() for guess in guessed]
    assert kept[0] > 0.7, kept
    assert kept[2] > 0.5, kept


def test_a_prompt_ends_where_the_model_is_to_speak() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for doc in documents(4, 60):
        whole = tokenizer.decode(
            encode(tokenizer, doc, 1536)[0].tolist(), skip_special_tokens=False
        )
        asked = tokenizer.decode(prompt(tokenizer, doc), skip_special_tokens=False)
        assert whole.startswith(asked)
        assert (
            doc.kind.startswith("text")
            or whole[len(asked) :] == doc.turns[-1].text + "<|im_end|>\n"
        )
