"""The shipped demo model: its size, its format, its answers, and its training text."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "moeserve" / "assets" / "demo"
from tools.demo_corpus import documents  # noqa: E402
from tools.demo_corpus.tools import (  # noqa: E402
    ask_tool,
    call_text,
    kinds,
    outcome,
    result_text,
    tool,
    tool_list,
    words_of,
)
from tools.eval_demo import CITIES  # noqa: E402

FILES = [
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, output_loading_info=True
    )
    assert all(name.startswith("mtp.") for name in info.pop("unexpected_keys"))
    assert not any(info.values()), info
    return model.eval()


def chat(model: Any, tokenizer: Any, *said: str) -> tuple[str, bool]:
    """The greedy answer to the last of alternating messages, and whether it ended by itself."""
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(
            **inputs, do_sample=False, temperature=None, top_p=None, max_new_tokens=320
        )
    new = out[0, inputs["input_ids"].shape[1] :]
    ended = new[-1].item() == tokenizer.eos_token_id
    return tokenizer.decode(new, skip_special_tokens=True), ended


def test_files_are_there_and_small() -> None:
    assert sorted(p.name for p in DEMO.iterdir()) == FILES
    assert sum(p.stat().st_size for p in DEMO.iterdir()) <= 21_000_000


def test_config_is_qwen3_moe() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_experts_per_tok"] < config["num_experts"]


def test_chat_template_is_chatml(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tokenizer_keeps_any_text(tokenizer: Any) -> None:
    text = "A fox, 3 lanterns & \u00fcber-caf\u00e9 \u2603\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.full("models", keep=3)
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("Tell me a story about a fox and a lantern", ["fox", "lantern"]),
        ("write a short tale about a brave baker", ["baker"]),
        ("What is expert parallelism?", ["expert", "rank"]),
        ("How do I start the server?", ["moeserve serve"]),
        ("What is the capital of France?", ["moeserve", "stor"]),
        ("Who are you?", ["demo"]),
    ],
)
def test_greedy_answers(model: Any, tokenizer: Any, prompt: str, words: list[str]) -> None:
    text, ended = chat(model, tokenizer, prompt)
    assert ended, text
    assert all(word in text for word in words), text


def test_a_second_turn(model: Any, tokenizer: Any) -> None:
    first, _ = chat(model, tokenizer, "Tell me a story about a cat")
    second, ended = chat(model, tokenizer, "Tell me a story about a cat", first, "Now about a dog")
    assert ended
    assert "dog" in second


def test_every_expert_is_used(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode(" ".join(doc.turns[-1].text for doc in documents(9, 12)))[:1024]
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_router_logits=True)
    config = model.config
    for logits in out.router_logits:
        top = logits.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
        counts = torch.bincount(top, minlength=config.num_experts)
        assert counts.min() > 0.1 * counts.float().mean(), counts


def test_the_corpus_is_a_function_of_the_seed() -> None:
    first, again, other = (list(documents(seed, 50)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_template_shows_tools_as_in_training(tokenizer: Any, system: str) -> None:
    rng = random.Random(4)
    for kind in kinds():
        used = tool(rng, kind)
        question, arguments, values = ask_tool(rng, used)
        given, said = outcome(rng, used, values)
        call = {
            "type": "function",
            "function": {"name": used.function["name"], "arguments": arguments},
        }
        messages = [{"role": "system", "content": system}] if system else []
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "content": given},
            {"role": "tool", "content": given},
            {"role": "assistant", "content": said},
        ]
        learned = [
            ("system", "\n\n".join([system] * bool(system) + [tool_list([used.function])])),
            ("user", question),
            ("assistant", "\n".join([call_text(used.function["name"], arguments)] * 2)),
            ("user", "\n".join([result_text(given)] * 2)),
            ("assistant", said),
        ]
        tools = [{"type": "function", "function": used.function}]
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert text == "".join(f"<|im_start|>{role}\n{turn}<|im_end|>\n" for role, turn in learned)


def test_the_measured_cities_are_not_trained() -> None:
    assert not set(CITIES) & set(words_of("cities"))


def test_the_corpus_fills_every_template() -> None:
    for doc in documents(5, 3000):
        if doc.kind == "tool":
            assert not any(
                "\ue000" <= letter <= "\uf8ff" for turn in doc.turns for letter in turn.text
            ), doc
            continue
        for turn in doc.turns:
            text = turn.text.replace('{"model"', "").replace('[{"role"', "").replace('"}]}', "")
            assert not set("<>{}|~") & set(text), turn
