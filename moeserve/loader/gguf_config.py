"""What a GGUF file says, in the words of Hugging Face checkpoints: config.json's keys, and the
tensors' names.

llama.cpp's converters write the keys `ARCHITECTURE.block_count` and so on; `_ROWS` has what each
architecture's graph computes besides. A key of the architecture that is not known is refused: it
may change numbers.
"""

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.loader.fields import Fields
from moeserve.loader.gguf_file import GGUFHeader, read_model
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight
from moeserve.loader.stored_format import GGML_FORMATS

# expert_gating_func
_SOFTMAX = 1
_SIGMOID = 2
_SELECTED = 3
_MAX = 2**31
_KEYS = {  # of every architecture
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.sliding_window": "sliding_window",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "feed_forward_length": "intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_READ = {  # below, or of no effect
    "attention.causal",
    "attention.key_length_mla",
    "attention.value_length",
    "attention.value_length_mla",
    "expert_gating_func",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
    "tensor_data_layout",
    "vocab_size",
}
# Numbers that no tensor's shape can verify; llama.cpp demands them, too.
_REQUIRED = (
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "block_count",
    "context_length",
    "embedding_length",
)
# llama.cpp's values of keys that a file leaves out
_ABSENT = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "sliding_window": None,
}
_ROPE_FACTORS = "rope_freqs.weight"  # of each wavelength: how Llama 3.1 stretches its context
_SAMPLING = {  # keys of generation_config.json, and those behind "general.sampling."
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>")


@dataclass(frozen=True, slots=True)
class _Row:
    """What llama.cpp's graph of one architecture computes."""

    architecture: str  # in config.json
    keys: Mapping[str, str] = field(default_factory=dict)  # beside `_KEYS`
    absent: Mapping[str, Any] = field(default_factory=dict)  # beside `_ABSENT`
    required: tuple[str, ...] = ()  # beside `_REQUIRED`
    gating: int = _SOFTMAX  # how experts are scored
    shared: str = "mlp.shared_experts"  # the module of shared experts
    pairs: bool = False  # rows of q and k are reordered: those of a rotated pair lie side by side


_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
_SHARED = "expert_shared_feed_forward_length"
_GRANITE_ABSENT = {
    "attention_multiplier": None,  # 1 / sqrt(head_dim)
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
_GRANITE_ROW = _Row(
    "GraniteMoeForCausalLM", _GRANITE, _GRANITE_ABSENT, required=("logit_scale",), pairs=True
)
# architecture -> rows: the one of a key that is there and not 0, or ""
_ROWS: dict[str, dict[str, _Row]] = {
    "deepseek2": {
        "sigmoid": _Row("DeepseekV3ForCausalLM", gating=_SIGMOID),
        "": _Row("DeepseekV2ForCausalLM"),
    },
    "dots1": {"": _Row("Dots1ForCausalLM", gating=_SIGMOID)},
    "glm4moe": {"": _Row("Glm4MoeForCausalLM", gating=_SIGMOID)},
    "gpt-oss": {
        "": _Row(
            "GptOssForCausalLM",
            {"expert_feed_forward_length": "intermediate_size"},
            required=("attention.sliding_window",),
            gating=_SELECTED,
        )
    },
    "granitemoe": {
        _SHARED: replace(
            _GRANITE_ROW,
            architecture="GraniteMoeSharedForCausalLM",
            keys=_GRANITE | {_SHARED: "shared_intermediate_size"},
            shared="shared_mlp",
        ),
        "": _GRANITE_ROW,
    },
    "llama": {
        "expert_count": _Row("MixtralForCausalLM", pairs=True),
        "": _Row("LlamaForCausalLM", pairs=True),
    },
    "minimax-m2": {
        "": _Row(
            "MiniMaxM2ForCausalLM",
            {"expert_feed_forward_length": "intermediate_size"},
            gating=_SIGMOID,
        )
    },
    "olmoe": {"": _Row("OlmoeForCausalLM", {"attention.clamp_kqv": "clip_qkv"})},
    "qwen2": {"": _Row("Qwen2ForCausalLM")},
    "qwen2moe": {
        "": _Row(
            "Qwen2MoeForCausalLM",
            {_SHARED: "shared_expert_intermediate_size"},
            shared="mlp.shared_expert",
        )
    },
    "qwen3": {"": _Row("Qwen3ForCausalLM")},
    "qwen3moe": {"": _Row("Qwen3MoeForCausalLM", absent={"norm_topk_prob": True})},
}
ARCHITECTURES = tuple(_ROWS)

_WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_(exps|shexp)")


def gguf_tensors(path: Path) -> tuple[dict[str, TensorInfo], dict[str, StoredWeight]]:
    """Returns a model's tensors by the names that blocks ask for, and those of them that are
    quantised.
    """
    headers = read_model(path)
    shared = _row(headers)[0].shared
    tensors = {}
    for tensor in (tensor for header in headers for tensor in header.tensors):
        if tensor.name == _ROPE_FACTORS:
            continue  # part of the config
        name = _name(tensor.name, shared)
        shape = tensor.shape
        if name in tensors:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} is in two files, or there under two names"
            )
        if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)
        tensors[name] = TensorInfo(
            name, tensor.path, tensor.dtype, shape, tensor.offset, tensor.num_bytes
        )
    embedding = tensors.get("model.embed_tokens.weight")
    if (
        embedding and embedding.dtype in GGML_FORMATS
    ):  # a tied head is multiplied in few bits, rows are looked up wide
        tensors.setdefault("lm_head.weight", replace(embedding, name="lm_head.weight"))
    quantised = ((name, tensor, GGML_FORMATS.get(tensor.dtype)) for name, tensor in tensors.items())
    return tensors, {
        name: StoredWeight(form, tensor, tensor) for name, tensor, form in quantised if form
    }


def _name(name: str, shared: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names stay."""
    if (block := _BLOCK.fullmatch(name)) is None:
        base, _, ending = name.rpartition(".")
        return f"{_WHOLE_MODEL[base]}.{ending}" if base in _WHOLE_MODEL else name
    layer, base, ending = block.groups()
    if experts := _EXPERTS.fullmatch(base):
        product = f"{experts[1]}_proj"
        routed = f"mlp.experts.{product}" + "_bias" * (ending == "bias")
        theirs = routed if experts[2] == "exps" else f"{shared}.{product}.{ending}"
    elif base in ("exp_probs_b", "attn_sinks"):
        theirs = {
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            "attn_sinks": "self_attn.sinks",
        }[base]
    elif base in _LAYER:
        theirs = f"{_LAYER[base]}.{ending}"
    else:
        return name
    return f"model.layers.{layer}.{theirs}"


def document(path: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file of a model directory; {} if GGUF has nothing of it."""
    headers = read_model(path)
    if name == "config.json":
        return _config(headers)
    meta = headers[0].metadata
    if name == "generation_config.json":
        keys = {key: f"general.sampling.{ours}" for key, ours in _SAMPLING.items()}
        return {key: _plain(meta[theirs]) for key, theirs in keys.items() if theirs in meta}
    return _tokenizer_config(meta) if name == "tokenizer_config.json" else {}


def _tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    config = {}
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    tokens = meta.get("tokenizer.ggml.tokens", [])
    for key, name in {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}.items():
        number = meta.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    return config


def _row(headers: list[GGUFHeader]) -> tuple[_Row, dict[str, Any]]:
    """Return the row of the architecture, and its metadata without the architecture's name."""
    header = headers[0]
    name = header.metadata.get("general.architecture")
    if name not in _ROWS:
        shown = repr(name)[:80]
        raise CheckpointError(
            f"{header.path}: general.architecture is {shown}; supported as GGUF: "
            f"{', '.join(_ROWS)}. Serve the model's "
            "safetensors checkpoint if docs/models.md has it"
        )
    begin = f"{name}."
    own = {
        key[len(begin) :]: _plain(value)
        for key, value in header.metadata.items()
        if key.startswith(begin)
    }
    sigmoid = own.get("expert_gating_func") == _SIGMOID
    if not own.get("expert_gating_func"):  # converters write it only if config.json has it
        tensors = (tensor.name for each in headers for tensor in each.tensors)
        sigmoid = any(".exp_probs_b" in name for name in tensors)
    rows = _ROWS[name]
    row = next(
        (rows[key] for key in rows if key and (own.get(key) or (key == "sigmoid" and sigmoid))),
        None,
    )
    return row or rows[""], own


def _config(headers: list[GGUFHeader]) -> dict[str, Any]:
    """Return what config.json would say."""
    row, own = _row(headers)
    path = headers[0].path
    meta = headers[0].metadata
    tensors = [tensor for header in headers for tensor in header.tensors]
    names = {tensor.name for tensor in tensors}
    _check_keys(path, row, own)
    values = Fields(path, own, {"expert_gating_func": 0, "nextn_predict_layers": 0})
    if values.raw("expert_gating_func") not in (0, row.gating):
        raise values.error("expert_gating_func", f"{row.architecture} has {row.gating}")
    values.only(**{"attention.causal": True})
    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise CheckpointError(
            f"{path}: the tensor 'token_embd.weight' is missing; this is no language model's file"
        )
    heads = values.integer("attention.head_count", 1, _MAX)
    config: dict[str, Any] = {**_ABSENT, "num_key_value_heads": heads, **row.absent}
    config |= {
        name: own[key] for table in (_KEYS, row.keys) for key, name in table.items() if key in own
    }
    mtp = values.integer("nextn_predict_layers", 0, _MAX)
    tokens = meta.get("tokenizer.ggml.tokens", [])
    ends = [*_ends(meta), *(tokens.index(end) for end in _ENDS if end in tokens)]
    config |= _latent(values, row) if "attention.kv_lora_rank" in own else _heads(values, row)
    if config.get("attention_multiplier", 0) is None:
        config["attention_multiplier"] = config["head_dim"] ** -0.5
    config |= {
        "architectures": [row.architecture],
        "attention_bias": any(re.fullmatch(r"blk\.\d+\.attn_q\.bias", name) for name in names),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "dtype": _dtype(tensors),
        "eos_token_id": ends or None,
        "num_hidden_layers": values.integer("block_count", 1, _MAX) - mtp,
        "num_nextn_predict_layers": mtp,
        "rope_factors": _rope_factors(tensors),
        "rope_parameters": _rope(values, row),
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": embedding.shape[0],
    }
    return config | _quantisation(tensors)


def _check_keys(path: Path, row: _Row, own: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an unknown key, and for a missing one that no shape can verify."""
    for key in own:
        if not any(key in known for known in (_KEYS, row.keys, _READ)):
            raise CheckpointError(
                f"{path}: the metadata key {key[:80]!r} of its architecture is not known, and may "
                "change what the model computes; serve the model's safetensors checkpoint"
            )
    of_experts = ("expert_used_count",) if own.get("expert_count") else ()
    for key in (*_REQUIRED, *row.required, *of_experts):
        if key not in own:
            raise CheckpointError(
                f"{path}: the metadata key {key!r} of its architecture is missing, and nothing "
                "else in the file has its value; download another file"
            )


def _heads(values: Fields, row: _Row) -> dict[str, Any]:
    """Return the keys of attention with keys and values for each head."""
    own = values.values
    width = values.integer("embedding_length", 1, _MAX)
    heads = values.integer("attention.head_count", 1, _MAX)
    head_dim = own.get("attention.key_length") or width // heads
    if own.get("attention.value_length", head_dim) != head_dim:
        raise values.error("attention.value_length", f"supported: {head_dim}, the length of keys")
    rotated = own.get("rope.dimension_count", head_dim)
    return {
        "head_dim": head_dim,
        "rope_interleaved_rows": row.pairs,
        **({"partial_rotary_factor": rotated / head_dim} if rotated != head_dim else {}),
    }


def _latent(values: Fields, row: _Row) -> dict[str, Any]:
    """Return the keys of DeepSeek's attention; older files have the lengths of whole heads."""
    ends = [
        key + "_mla" * (key + "_mla" in values.values)
        for key in ("attention.key_length", "attention.value_length")
    ]
    keys, v_dim = (values.integer(key, 1, _MAX) for key in ends)
    rotated = values.integer("rope.dimension_count", 2, keys)
    groups = values.values.get("expert_group_count") or 1
    return {
        "head_dim": None,
        "qk_nope_head_dim": keys - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": v_dim,
        "q_lora_rank": values.values.get("attention.q_lora_rank"),
        "n_group": groups,
        "topk_group": values.values.get("expert_group_used_count") or 1,
        **(
            {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
            if row.gating == _SOFTMAX
            else {}
        ),
    }


def _rope(values: Fields, row: _Row) -> dict[str, Any]:
    """Returns rope_parameters."""
    own = values.values
    kind = own.get("rope.scaling.type", "linear" if own.get("rope.scaling.factor") else "none")
    if kind not in ("none", "linear", "yarn"):
        raise values.error("rope.scaling.type", "supported: none, linear, yarn")
    rope = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": own.get("rope.freq_base", 10_000.0),
    }
    if kind != "none":
        rope["factor"] = own.get("rope.scaling.factor")
    if kind == "yarn":
        rope["truncate"] = row.architecture != "GptOssForCausalLM"
        names = {"original_context_length": "original_max_position_embeddings"}
        names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        rope |= {
            name: own[f"rope.scaling.{key}"]
            for key, name in names.items()
            if f"rope.scaling.{key}" in own
        }
        if "rope.scaling.yarn_log_multiplier" in own:  # llama.cpp has both magnitudes alike
            rope["mscale"] = rope["mscale_all_dim"] = round(
                own["rope.scaling.yarn_log_multiplier"] * 10, 6
            )
    return rope


def _rope_factors(tensors: list[TensorInfo]) -> list[float] | None:
    """Return the factor of each wavelength, None if the file has none."""
    tensor = next((tensor for tensor in tensors if tensor.name == _ROPE_FACTORS), None)
    if tensor is None:
        return None
    if tensor.dtype != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(
            f"{tensor} is {tensor.dtype} {list(tensor.shape)}; supported: F32 in one dimension"
        )
    with (
        CheckpointError.instead_of(OSError, f"{tensor.path} cannot be read"),
        tensor.path.open("rb") as file,
    ):
        file.seek(tensor.offset)
        raw = file.read(tensor.num_bytes)
    if len(raw) != tensor.num_bytes:
        raise CheckpointError(f"{tensor} ends early; download the file again")
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def _ends(meta: Mapping[str, Any]) -> list[int]:
    ids = (meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return [number for number in ids if isinstance(number, int)]


def _quantisation(tensors: list[TensorInfo]) -> dict[str, Any]:
    """Returns the formats of quantised weights, the one of most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in GGML_FORMATS:
            sizes[tensor.dtype] += tensor.num_bytes
    types = [name for name, _ in sizes.most_common()]
    return {"quantization_config": {"quant_method": "gguf", "types": types}} if types else {}


def _dtype(tensors: list[TensorInfo]) -> str:
    """Returns the dtype that most elements have; bfloat16 for quantised ones."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += math.prod(tensor.shape)
    return {"F32": "float32", "F16": "float16"}.get(sizes.most_common(1)[0][0], "bfloat16")


def _plain(value: Any) -> Any:
    """Numbers as config.json would have them: floats without the digits that fp32 adds, one for an
    array of equals.
    """
    import numpy as np  # here: whoever asks for a config waits for it otherwise

    if isinstance(value, np.ndarray):
        value = value.tolist()
        return value[0] if value and all(item == value[0] for item in value) else value
    return (
        float(str(np.float32(value)))
        if isinstance(value, float) and math.isfinite(value)
        else value
    )
