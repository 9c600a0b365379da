"""Writes checkpoints with about a billion random weights for benchmarks.peers.

    python -m benchmarks.peers_models DIR --shape deepseek-v2-lite
    python -m benchmarks.peers_models DIR --shape gpt-oss --gguf FILE --llamacpp SOURCES

DIR becomes a Hugging Face directory in bf16 as transformers saves it, without a tokenizer. Kinds of
layers have the published names, because llama.cpp's converter knows no others. With --gguf that
converter writes the same weights; SOURCES is a folder with its convert_hf_to_gguf.py and
conversion/, and the package gguf must be installed.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import parser

# Widths of heads and latents, experts per token and kinds of layers are the published ones. Hidden
# sizes are half or less, with fewer heads in proportion, and there are fewer experts.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lite": (
        "DeepseekV2",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 27,  # llama.cpp infers from it that queries are not compressed
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 1,
            "intermediate_size": 2736,
            "moe_intermediate_size": 352,
            "n_routed_experts": 32,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "scoring_func": "softmax",
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "hidden_size": 1152,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "intermediate_size": 1152,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "num_experts": 96,
            "num_experts_per_tok": 10,
        },
    ),
    "granite-4-h": (
        "GraniteMoeHybrid",
        {
            "hidden_size": 768,
            "num_hidden_layers": 20,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(20)],
            "position_embedding_type": "nope",
            "intermediate_size": 256,
            "shared_intermediate_size": 512,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
}
CONVERTER_FLAGS = {"qwen3-next": ["--no-mtp"]}  # by default it expects an MTP head
COMMON = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
}
ENDS = {"eos_token_id": 1, "pad_token_id": 1}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("out", type=Path, metavar="DIR")
    flags.add_argument("--shape", choices=SHAPES, required=True)
    flags.add_argument("--gguf", type=Path, metavar="FILE", help="the same weights for llama.cpp")
    flags.add_argument(
        "--llamacpp", type=Path, metavar="SOURCES", help="where its convert_hf_to_gguf.py is"
    )
    args = flags.parse_args()
    if (args.gguf is None) != (args.llamacpp is None):
        flags.error("--gguf FILE and --llamacpp SOURCES go together")
    print(f"{args.out}: {write_checkpoint(args.shape, args.out) / 1e6:.0f} M parameters")
    if args.gguf is not None:
        write_gguf(args.out, args.gguf, args.llamacpp, CONVERTER_FLAGS.get(args.shape, ()))


def write_checkpoint(shape: str, out: Path) -> int:
    """Write random bf16 weights; return the number of parameters."""
    import transformers

    family, options = SHAPES[shape]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**COMMON, **ENDS, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(out)
    if "layer_types" in options:
        file = out / "config.json"
        file.write_text(
            json.dumps(
                json.loads(file.read_text()) | {"layer_types": options["layer_types"]}, indent=2
            )
        )
    return sum(weight.numel() for weight in model.parameters())


def write_gguf(checkpoint: Path, out: Path, sources: Path, flags: Sequence[str] = ()) -> None:
    """Run llama.cpp's converter with a vocabulary that has a size but no strings.

    `flags` are passed on to the converter.
    """
    sys.path.insert(0, str(sources))
    from conversion.base import TextModel  # type: ignore[import-not-found]

    def sized(model: Any, *_: Any) -> None:
        model._set_vocab_none()
        model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])

    TextModel._set_vocab_gpt2 = TextModel._set_vocab_builtin = sized
    sys.argv = [
        "convert_hf_to_gguf.py",
        str(checkpoint),
        "--outfile",
        str(out),
        "--outtype",
        "bf16",
        *flags,
    ]
    runpy.run_path(str(sources / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
