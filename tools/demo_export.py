"""Write the demo model as a Qwen3-MoE checkpoint that transformers and moeserve can load."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model import DemoModel, Shape

TEXT_END, START, END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
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
        # No layer is dense; the value only has to be there.
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


def tensors(model: DemoModel) -> dict[str, Tensor]:
    """The weights under the names of real Qwen3-MoE checkpoints, one tensor per expert."""
    named: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm.weight}
    for n, layer in enumerate(model.stack):
        at = f"model.layers.{n}."
        attention, experts = layer.attention, layer.experts
        named[at + "input_layernorm.weight"] = layer.input_norm.weight
        named[at + "post_attention_layernorm.weight"] = layer.post_norm.weight
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            named[f"{at}self_attn.{part}.weight"] = getattr(attention, part)
        named[at + "self_attn.q_norm.weight"] = attention.q_norm.weight
        named[at + "self_attn.k_norm.weight"] = attention.k_norm.weight
        named[at + "mlp.gate.weight"] = experts.router
        for e in range(model.shape.experts):
            gate, up = experts.gate_up[e].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": experts.down[e]}
            for part, weight in parts.items():
                named[f"{at}mlp.experts.{e}.{part}.weight"] = weight
    return {k: v.detach().to(torch.bfloat16).contiguous().clone() for k, v in named.items()}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def export(folder: Path, model: DemoModel, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
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
