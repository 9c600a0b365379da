"""The tensors of a GGUF model, by the names that they have in a Hugging Face checkpoint."""

import math
import re
from dataclasses import replace
from pathlib import Path

from moeserve.errors import CheckpointError
from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import GGUFArchitecture
from moeserve.loader.gguf_config import CONFIG_TENSORS, architecture_of
from moeserve.loader.gguf_file import read_model
from moeserve.loader.gguf_layers import num_layers
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight
from moeserve.loader.stored_format import GGML_FORMATS

# GGUF name -> Hugging Face name, outside of layers. All but the LM head begin with the decoder's
# prefix.
_GLOBAL_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
}
# GGUF name -> Hugging Face name, within a layer
_LAYER_NAMES = {
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
_BLOCK = re.compile(r"blk\.([0-9]{1,4})\.(.+?)(\.(?:weight|bias|scale))?")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_(exps|shexp)")


def gguf_tensors(path: Path) -> tuple[dict[str, TensorInfo], dict[str, StoredWeight]]:
    """Return a model's tensors by their Hugging Face names, and the quantized ones among them."""
    headers = read_model(path)
    arch, arch_meta = architecture_of(headers)
    first_mtp_layer = num_layers(Fields(path, arch_meta, {"nextn_predict_layers": 0}))
    tensors = {}
    outer_scales = {}  # by name of the weight that they multiply
    for tensor in (tensor for header in headers for tensor in header.tensors):
        if tensor.name in CONFIG_TENSORS:
            continue  # part of the config
        if tensor.name.endswith(".scale") and _is_outer_scale(tensor.name, arch):
            weight = tensor.name.removesuffix(".scale") + ".weight"
            outer_scales[_hugging_face_name(weight, arch, first_mtp_layer)] = tensor
            continue
        name = _hugging_face_name(tensor.name, arch, first_mtp_layer)
        shape = _hugging_face_shape(tensor, arch)
        if name in tensors:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} is in two files, or under two names in one"
            )
        tensors[name] = replace(tensor, name=name, shape=shape)
    embed = arch.global_names.get("token_embd", f"{arch.model}embed_tokens")
    embedding = tensors.get(f"{embed}.weight")
    if embedding and embedding.dtype in GGML_FORMATS:
        # A tied LM head stays quantized, while the embedding table is dequantized.
        tensors.setdefault("lm_head.weight", replace(embedding, name="lm_head.weight"))
    stored = {}
    for name, tensor in tensors.items():
        if form := GGML_FORMATS.get(tensor.dtype):
            # One tensor has both: each block of values begins or ends with its scales.
            stored[name] = StoredWeight(form, values=tensor, scales=tensor)
    for name, scale in outer_scales.items():
        stored[name] = _with_outer_scale(path, stored.get(name), scale)
    return tensors, stored


def _with_outer_scale(path: Path, stored: StoredWeight | None, scale: TensorInfo) -> StoredWeight:
    """Add the tensor that multiplies an NVFP4 weight: one number, or one for each expert."""
    is_supported = stored is not None and stored.format.ggml == "NVFP4"
    if stored is not None and is_supported:
        shape = stored.values.shape
        sizes = (1, shape[0]) if len(shape) == 3 else (1,)
        is_supported = math.prod(scale.shape) in sizes
    if stored is None or not is_supported:
        raise CheckpointError(
            f"{path}: tensor {scale.name!r} of shape {list(scale.shape)} is not supported: only "
            "NVFP4 weights have scales beside them, one each or one for each expert"
        )
    return replace(stored, format=replace(stored.format, scales="F32"), outer_scale=scale)


def _hugging_face_shape(tensor: TensorInfo, arch: GGUFArchitecture) -> tuple[int, ...]:
    block = _BLOCK.fullmatch(tensor.name)
    if block is None:
        return tensor.shape
    if block[2] == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        return (1, *tensor.shape)
    if block[2] in arch.shapes:
        shape = arch.shapes[block[2]](tensor.shape)
        if math.prod(shape) != math.prod(tensor.shape):
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name!r} of shape {list(tensor.shape)} is not "
                f"supported: {list(shape)} would have another number of elements; download it "
                "again"
            )
        return shape
    return tensor.shape


def _hugging_face_name(name: str, arch: GGUFArchitecture, first_mtp_layer: int) -> str:
    """Return the name in a Hugging Face checkpoint; unknown names are unchanged.

    blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight
    """
    if (block := _BLOCK.fullmatch(name)) is None:
        base, _, ending = name.rpartition(".")
        if base in arch.global_names:
            return f"{arch.global_names[base]}.{ending}"
        if base in _GLOBAL_NAMES:
            model = "" if base == "output" else arch.model
            return f"{model}{_GLOBAL_NAMES[base]}.{ending}"
        return name
    layer, base, ending = block.groups(default="")
    prefix = f"{arch.model}layers.{layer}."
    if (mtp_layer := int(layer) - first_mtp_layer) >= 0:
        if base in arch.mtp_names:
            return f"{arch.mtp_names[base].format(mtp_layer)}{ending}"
        prefix = arch.mtp_layer.format(mtp_layer) or prefix
    new_name = _layer_name(base, ending, arch)
    return f"{prefix}{new_name}" if new_name else name


def _layer_name(base: str, ending: str, arch: GGUFArchitecture) -> str:
    """Return the name within a layer, "" if it is unknown. ending: for example ".weight", or ""."""
    if base + ending in arch.exact_names:
        return arch.exact_names[base + ending]
    if base in arch.names:
        return arch.names[base] + ending
    if experts := _EXPERTS.fullmatch(base):
        product = f"{experts[1]}_proj"
        if experts[2] == "shexp":
            return f"{arch.shared}.{product}{ending}"
        return f"mlp.experts.{product}{'_bias' if ending == '.bias' else ''}"
    if base == "ffn_gate_up_exps":
        return f"mlp.experts.gate_up{'_bias' if ending == '.bias' else ''}"
    if base == "exp_probs_b":
        return "mlp.gate.e_score_correction_bias"
    if base == "attn_sinks":
        return "self_attn.sinks"
    return _LAYER_NAMES[base] + ending if base in _LAYER_NAMES else ""


def _is_outer_scale(name: str, arch: GGUFArchitecture) -> bool:
    """Return whether a tensor multiplies a weight, and is no parameter of its own."""
    block = _BLOCK.fullmatch(name)
    return block is None or block[2] + ".scale" not in arch.exact_names
