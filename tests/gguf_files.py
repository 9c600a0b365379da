"""Write small checkpoints as GGUF files, as llama.cpp's converters do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from moeserve.text.tokenizer import Tokenizer
from tests.families import YARN

FAMILIES = {  # family of tests/families.py -> architecture in GGUF
    "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "mixtral": "llama", "llama": "llama",
    "qwen2": "qwen2", "qwen3": "qwen3", "olmoe": "olmoe", "granite_moe": "granitemoe",
    "granite_moe_shared": "granitemoe", "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe",
    "dots1": "dots1", "minimax_m2": "minimax-m2", "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}  # fmt: skip
OPTIONS = {  # config overrides: values that llama.cpp assumes, because it has no key for them
    "gpt_oss": {"swiglu_limit": 7.0},
    "dots1": {"sliding_window": None},
    "deepseek_v2": {"rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.9}},
}  # fmt: skip
Choose = Callable[[str, tuple[int, ...]], gguf.GGMLQuantizationType]
KINDS = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "NVFP4",
    "Q2_K",
    "Q3_K",
    "TQ1_0",
    "TQ2_0",
    "IQ3_XXS",
    "IQ3_S",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ1_S",
    "IQ1_M",
)
_SCALES = {  # offsets of fp16 scales in a block; other types have one at 0
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
}
F32 = gguf.GGMLQuantizationType.F32


def as_f32(name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
    return F32


def matrices(*kinds: str) -> Choose:
    """Return a function that chooses one of these types for each matrix.

    Routers, and matrices whose rows are no whole number of blocks, stay in F32.
    """
    quantized = [gguf.GGMLQuantizationType[kind] for kind in kinds]

    def choose(name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
        kind = quantized[sum(name.encode()) % len(quantized)]
        whole = shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        return kind if len(shape) > 1 and "ffn_gate_inp" not in name and whole else F32

    return choose


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return rows of a type with random bits, and scales for weights around 0.1."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = rng.integers(120, 125, raw.shape[:-1])
    if kind == "NVFP4":
        raw[..., :4] = rng.integers(1, 40, (*raw.shape[:-1], 4))
    small = {
        "Q2_K": 5e-3,
        "Q3_K": 2e-3,
        "Q4_K": 6e-4,
        "Q5_K": 3e-4,
        "Q6_K": 1e-4,
        "Q8_0": 2e-3,
        "IQ4_NL": 2e-3,
        "IQ4_XS": 1e-4,
        "IQ3_XXS": 1e-3,
        "IQ3_S": 1e-3,
        "IQ2_XXS": 2e-3,
        "IQ2_XS": 2e-3,
        "IQ2_S": 2e-3,
    }.get(kind, 0.02)
    num_scales = len(_SCALES.get(kind, (0,)))
    scales = rng.uniform(small / 2, small, (*raw.shape[:-1], num_scales)).astype(np.float16)
    put_scales(kind, raw, scales)
    return raw.reshape(*shape[:-1], -1)


def put_scales(kind: str, raw: np.ndarray, scales: np.ndarray) -> None:
    """Write fp16 scales [..., number of scales] into blocks [..., bytes]."""
    if kind == "IQ1_M":  # in the upper nibbles of four words
        words = raw[..., 48:56].copy().view(np.uint16)
        nibbles = (scales[..., :1].view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16)) & 15
        raw[..., 48:56] = ((words & 0x0FFF) | (nibbles << 12)).astype(np.uint16).view(np.uint8)
        return
    for i, at in enumerate(_SCALES.get(kind, (0,))):
        raw[..., at : at + 2] = scales[..., i : i + 1].copy().view(np.uint8)


def write_gguf(
    name: str,
    checkpoint: Path,
    path: Path,
    choose: Choose = as_f32,
    *,
    tokenizer: Path | None = None,
    split: int = 0,
    meaning: bool = False,
    outer_scales: bool = False,
    **metadata: Any,
) -> Path:
    """Write a family's checkpoint as GGUF; return the (first) file.

    choose gives the type of each tensor; quantized ones get random blocks. metadata replaces the
    keys that a converter writes; None omits a key. split is the number of tensors per file. With
    `meaning`, quantized tensors are written dequantized, in fp32. outer_scales: quantized tensors
    have scales beside them, one or one for each expert.
    """
    arch = FAMILIES[name]
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    for key, value in (_metadata(arch, config) | metadata).items():
        _add(writer, f"{arch}.{key}", value)
    if tokenizer:
        add_tokenizer(writer, tokenizer)
    for theirs, tensor in _tensors(name, arch, config, load_file(checkpoint / "model.safetensors")):
        data = tensor.float().contiguous().numpy()
        kind = choose(theirs, tuple(tensor.shape))
        if kind in (F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16):
            writer.add_tensor(
                theirs, data if kind == F32 else gguf.quants.quantize(data, kind), raw_dtype=kind
            )
            continue
        data = random_blocks(kind.name, tuple(tensor.shape), sum(theirs.encode()))
        outer = np.ones(1, np.float32)
        if outer_scales:
            outer = np.linspace(0.7, 1.3, len(tensor) if tensor.dim() == 3 else 1, dtype=np.float32)
        if meaning:
            factors = outer.reshape(-1, *[1] * (tensor.dim() - 1))
            writer.add_tensor(theirs, gguf.quants.dequantize(data, kind) * factors)
            continue
        writer.add_tensor(theirs, data, raw_dtype=kind)
        if outer_scales:
            writer.add_tensor(theirs.replace(".weight", ".scale"), outer)
    if (rope := config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_freqs(rope, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()
    return path if not split else min(path.parent.glob(f"{path.stem}-*"))


def _rope_freqs(rope: dict[str, Any], config: dict[str, Any]) -> np.ndarray:
    """Return Llama 3.1's factor for each wavelength, as llama.cpp's converter does."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / waves - low) / (high - low)
    kept = smooth.clip(0, 1)
    factors: np.ndarray = 1 / ((1 - kept) / rope["factor"] + kept)
    return factors.astype(np.float32)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Add a byte-level BPE tokenizer."""
    spec = json.loads(Tokenizer.load(folder).backend.to_str())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    special = {token["content"] for token in spec["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in vocab]
    )  # fmt: skip
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    )
    writer.add_eos_token_id(vocab.index(config["eos_token"]))
    template = folder / "chat_template.jinja"
    writer.add_chat_template(
        template.read_text() if template.is_file() else config["chat_template"]
    )


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


_KEYS = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "head_dim": "attention.key_length",
    "num_experts": "expert_count", "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale", "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale", "clip_qkv": "attention.clamp_kqv",
    "q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank",
}  # fmt: skip


def _metadata(arch: str, config: dict[str, Any]) -> dict[str, Any]:  # noqa: C901
    values = {key: config[name] for name, key in _KEYS.items() if config.get(name) is not None}
    if arch in ("qwen3moe", "qwen2moe", "olmoe"):
        values.pop("expert_weights_norm", None)
    rope = config.get("rope_parameters") or {}
    values["rope.freq_base"] = float(rope.get("rope_theta", config.get("rope_theta", 1e4)))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "attention.key_length" in values:
        values["attention.value_length"] = head
    if arch == "gpt-oss":
        values |= {"attention.sliding_window": config["sliding_window"]}
    if arch in ("gpt-oss", "minimax-m2"):
        values["expert_feed_forward_length"] = config["intermediate_size"]
    if arch in ("llama", "granitemoe"):
        values |= {"rope.dimension_count": head, "vocab_size": config["vocab_size"]}
    if arch == "glm4moe":
        values |= {
            "rope.dimension_count": int(head * rope["partial_rotary_factor"]),
            "nextn_predict_layers": 0,
        }
    if arch == "minimax-m2":
        values["rope.dimension_count"] = config["rotary_dim"]
    if arch in ("glm4moe", "minimax-m2", "dots1"):
        values["expert_gating_func"] = gguf.ExpertGatingFuncType.SIGMOID.value
    if arch == "deepseek2":
        rank = config["kv_lora_rank"]
        nope = config["qk_nope_head_dim"]
        rotated = config["qk_rope_head_dim"]
        sigmoid = "n_group" in config and config["architectures"] == ["DeepseekV3ForCausalLM"]
        values |= {
            "attention.head_count_kv": 1, "attention.key_length": rank + rotated,
            "attention.value_length": rank, "attention.key_length_mla": nope + rotated,
            "attention.value_length_mla": config["v_head_dim"], "rope.dimension_count": rotated,
            "expert_gating_func": 2 if sigmoid else 1,
        }  # fmt: skip
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }  # fmt: skip
        if "mscale_all_dim" in rope:
            values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return values


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _tensors(  # noqa: C901
    name: str, arch: str, config: dict[str, Any], tensors: dict[str, Tensor]
) -> list[tuple[str, Tensor]]:
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    experts: dict[str, dict[int, Tensor]] = {}
    found: list[tuple[str, Tensor]] = []

    def put(theirs: str, tensor: Tensor) -> None:
        new = names.get_name(
            theirs.replace("e_score_correction_bias", "e_score_correction.bias"),
            try_suffixes=(".weight", ".bias"),
        )
        assert new is not None, theirs
        found.append((new, tensor))

    for theirs, tensor in tensors.items():
        if theirs.startswith(f"model.layers.{config['num_hidden_layers']}."):
            continue  # MTP layers, which this converter omits
        head, _, last = theirs.rpartition(".")
        if "q_proj" in theirs and arch in ("llama", "granitemoe"):
            put(theirs, _permuted(tensor, config["num_attention_heads"]))
        elif "k_proj" in theirs and arch in ("llama", "granitemoe"):
            put(theirs, _permuted(tensor, config["num_key_value_heads"]))
        elif ".experts." in theirs and (parts := theirs.split(".experts."))[1][0].isdigit():
            number, _, rest = parts[1].partition(".")
            experts.setdefault(f"{parts[0]}.experts.{rest}", {})[int(number)] = tensor
        elif theirs.endswith("experts.gate_up_proj"):
            gate, up = (
                (tensor.mT[:, ::2], tensor.mT[:, 1::2]) if arch == "gpt-oss" else tensor.chunk(2, 1)
            )
            put(f"{head}.gate_proj.weight", gate)
            put(f"{head}.up_proj.weight", up)
        elif theirs.endswith("experts.gate_up_proj_bias"):
            put(f"{head}.gate_proj.bias", tensor[:, ::2])
            put(f"{head}.up_proj.bias", tensor[:, 1::2])
        elif theirs.endswith("experts.down_proj_bias"):
            put(f"{head}.down_proj.bias", tensor)
        elif theirs.endswith("experts.down_proj"):
            put(f"{theirs}.weight", tensor.mT if arch == "gpt-oss" else tensor)
        elif theirs.endswith("input_linear.weight"):
            block = theirs.split(".")[2]
            which = "shexp" if "shared_mlp" in theirs else "exps"
            for part, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
                found.append((f"blk.{block}.ffn_{part}_{which}.weight", half))
        elif theirs.endswith("kv_b_proj.weight"):
            both = tensor.reshape(config["num_attention_heads"], -1, *tensor.shape[1:])
            keys, values = torch.split(both, [config["qk_nope_head_dim"], config["v_head_dim"]], 1)
            put(theirs.replace("kv_b_proj", "k_b_proj"), keys.mT)
            put(theirs.replace("kv_b_proj", "v_b_proj"), values)
        else:
            put(theirs + ".weight" if last == "sinks" else theirs, tensor.squeeze())
    for theirs, each in experts.items():
        put(theirs, torch.stack([each[i] for i in range(len(each))]))
    return found
