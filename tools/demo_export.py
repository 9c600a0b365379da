"""Write the demo model as a Qwen3-MoE checkpoint that transformers and moeserve can load."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model import Attention, DemoModel, Shape
from tools.demo_mtp import MTPHead

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TEXT_END, START, END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}
{{- messages[0]['content'] + '\\n\\n' }}
{%- endif %}
{{- '<tools>\\n' }}
{%- for tool in tools %}
{{- (tool['function'] or tool) | tojson + '\\n' }}
{%- endfor %}
{{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}
{%- if loop.first or loop.previtem['role'] != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem['role'] != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- elif message['tool_calls'] %}
{{- '<|im_start|>' + message['role'] }}
{%- if message['content'] %}
{{- '\\n' + message['content'] }}
{%- endif %}
{%- for call in message['tool_calls'] %}
{{- '\\n<tool_call>\\n{"name": ' + call['function']['name'] | tojson + ', "arguments": ' }}
{{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (tools and loop.first and message['role'] == 'system') %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "moe_intermediate_size": shape.expert_hidden,
        # No layer is dense, but the key is required.
        "intermediate_size": shape.expert_hidden * shape.top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": shape.layers,
        "router_aux_loss_coef": 0.01,
        "output_router_logits": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index(END),
        "pad_token_id": SPECIAL.index(TEXT_END),
        "torch_dtype": "bfloat16",
    }


@torch.no_grad()
def tensors(model: DemoModel) -> dict[str, Tensor]:
    """Return views of the weights with Qwen3-MoE's names, one tensor per expert."""
    named: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm.weight,
    }
    for n, layer in enumerate(model.stack):
        at = f"model.layers.{n}."
        experts = layer.experts
        named[at + "input_layernorm.weight"] = layer.input_norm.weight
        named[at + "post_attention_layernorm.weight"] = layer.post_norm.weight
        named |= _attention(at, layer.attention)
        named[at + "mlp.gate.weight"] = experts.router
        for e in range(model.shape.experts):
            gate, up = experts.gate_up[e].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": experts.down[e]}
            for part, weight in parts.items():
                named[f"{at}mlp.experts.{e}.{part}.weight"] = weight
    return named


@torch.no_grad()
def mtp_tensors(head: MTPHead) -> dict[str, Tensor]:
    """Return views of the weights with Qwen3-Next's names."""
    at = "mtp.layers.0."
    named: dict[str, Tensor] = {
        "mtp.fc.weight": head.fc,
        "mtp.pre_fc_norm_embedding.weight": head.norm_embedding.weight,
        "mtp.pre_fc_norm_hidden.weight": head.norm_hidden.weight,
        "mtp.norm.weight": head.norm.weight,
        at + "input_layernorm.weight": head.input_norm.weight,
        at + "post_attention_layernorm.weight": head.post_norm.weight,
    }
    named |= _attention(at, head.attention)
    for part in ("gate", "up", "down"):
        named[f"{at}mlp.{part}_proj.weight"] = getattr(head, part)
    return named


def _attention(at: str, attention: Attention) -> dict[str, Tensor]:
    at += "self_attn."
    named = {
        f"{at}{part}.weight": getattr(attention, part)
        for part in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    return named | {
        f"{at}{part}.weight": getattr(attention, part).weight for part in ("q_norm", "k_norm")
    }


def save(path: Path, named: dict[str, Tensor]) -> None:
    """Write tensors in bf16."""
    stored = {k: v.detach().to(torch.bfloat16).contiguous().clone() for k, v in named.items()}
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)


@torch.no_grad()
def load(folder: Path, named: dict[str, Tensor]) -> None:
    """Fill the tensors from a checkpoint's files, which must have all of them."""
    stored = {k: v for path in weight_files(folder) for k, v in load_file(path).items()}
    for name, tensor in named.items():
        tensor.copy_(stored[name])


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def export(folder: Path, model: DemoModel, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*weight_files(folder), folder / INDEX]:
        old.unlink(missing_ok=True)
    save(folder / WEIGHTS, tensors(model))
    _write(folder / "config.json", config(model.shape))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.shape.max_positions,
            "eos_token": END,
            "pad_token": TEXT_END,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        },
    )
    _write(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.9,
            "eos_token_id": [SPECIAL.index(END), SPECIAL.index(TEXT_END)],
            "pad_token_id": SPECIAL.index(TEXT_END),
        },
    )


def export_mtp(folder: Path, head: MTPHead) -> None:
    """Add the head to the model in `folder`, in a file of its own.

    The model's file is only renamed.
    """
    first, second = (folder / name for name in SHARDS)
    if (folder / WEIGHTS).exists():
        (folder / WEIGHTS).rename(first)
    save(second, mtp_tensors(head))
    weight_map: dict[str, str] = {}
    total = 0
    for path in (first, second):
        for name, tensor in load_file(path).items():
            weight_map[name] = path.name
            total += tensor.nbytes
    _write(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    values = json.loads((folder / "config.json").read_text())
    # No layer of the model is dense; the head's layer has this width.
    _write(
        folder / "config.json",
        values | {"intermediate_size": len(head.gate), "mtp_num_hidden_layers": 1},
    )
