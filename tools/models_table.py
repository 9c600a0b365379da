"""Write docs/models.md: each family of the registry, its parts, and the features that work with it.

    python -m tools.models_table          # write the file
    python -m tools.models_table --check  # fail if the file is out of date

Each row is read from the family's default configuration: that of a config.json with only the
architecture, and the keys of PUBLISHED and ONE_HEAD.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moeserve.blocks.attention import Attention
from moeserve.blocks.block_sparse_attention import BlockSparseAttention
from moeserve.blocks.compressed_attention import CompressedAttention
from moeserve.blocks.feed_forward import MoE
from moeserve.blocks.group_indexer import GroupIndexedAttention
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.mixer import Mixer
from moeserve.blocks.shared_latent_attention import SharedLatentAttention
from moeserve.models.hf_config import read_model_spec
from moeserve.models.registry import FAMILIES
from moeserve.models.spec import ModelSpec
from tools.written_page import run

PATH = Path(__file__).resolve().parent.parent / "docs" / "models.md"
HEAD = """# Models

For people who choose a model: the supported architectures, and what works with each.
`tools/models_table.py` writes this page from the registry (`moeserve/models/registry.py`), and a
test compares the two.

A checkpoint is served if its `config.json` names one of the architectures in the table. Some keys
of `config.json` select variants of a model. If a variant is not implemented, the checkpoint is
refused with the name of the key.

- **All families** support data parallelism (`--dp`), tensor parallelism (`--tp`), prefix caching,
  preemption, recovery from a dead engine, and the weight formats of
  [quantization.md](quantization.md). MoE families also support expert parallelism (`--ep`) and
  dual-batch overlap.
- **Some families** support an int8 KV cache or MTP heads: see the table. Other MTP heads in a
  checkpoint are not loaded.
- **Pictures and sound** are not read: a multimodal checkpoint serves text.
- **Blocks of tokens**: SDAR-MoE and LLaDA2 decode blocks from masks, on CPUs
  ([diffusion.md](diffusion.md)).
- **GPUs**: MiniMax-M3, Inkling and Inkling 2 run by torch's kernels, with `--determinism fast`.
- **Tests** (`tests/models`) compare the tokens and logits of every family with those of
  transformers' implementation, or of a plain loop in the tests where transformers has none, and the
  bits of a request alone with its bits in a batch. They use small random checkpoints on CPUs; no
  family has run on a GPU yet ([gpu.md](gpu.md)).
- **Code of a checkpoint.** Pickled weights are refused, and Python files (`auto_map`) are never
  imported. A chat template is a program in Jinja, which runs in a sandbox process with limits on
  time and memory ([security.md](security.md)).
- **Symbolic links** may point to files below the model's folder, and from a snapshot of the Hugging
  Face cache to its `blobs`. Other links are refused.
- **Names.** A model is a folder, a GGUF file (`model.gguf`, `X.GGUF`, a blob of Ollama), or a name
  on a Hugging Face hub: `owner/name`, `owner/name@revision`, `owner/name:Q4_K_M`, an address
  ([desktop.md](desktop.md#models-from-the-hub)). `owner/name/Q4` and `owner/name/file.gguf` are a
  folder and a file of a repository.
- **Other families** can come from a package ([plugins.md](plugins.md)).

The columns have the sizes of transformers' default configuration. If a model has several kinds of
layers, their values are separated by `;`, in the order of the column "mixers". Equal values are
written once.

- **mixers**: the attention (query heads / KV heads) or recurrence of the layers; see the terms
  below.
- **KV**: elements of the KV cache per token and layer, or of a recurrent layer's state
  ([recurrent.md](recurrent.md)).
- **layers see**: the positions that a token attends to.
- **experts**: how many of the routed experts a token uses, and the total width of shared experts.
- **router**: how experts are scored and weighted; see the terms below.
- **int8 KV**: whether a [KV cache in int8](quantization.md#the-kv-cache-in-int8) is supported.
  Recurrent states stay in fp32.
- **MTP**: whether an MTP head is loaded if the checkpoint has one
  ([speculation.md](speculation.md)).

Terms of the column "mixers":

- *latent, rank 512 + 64*: latent attention (MLA), with the widths of the compressed keys and values
  and of the rotary key
- *index heads*: heads of an indexer, which chooses the tokens that a query attends to (sparse
  attention)
- *head norms, full norms*: norms of queries and keys, in each head or over all heads together
- *unit norms*: norms of queries and keys without weights
- *value norm*: a norm of values, without weights
- *one key and value*: all heads share one vector per token, which is key and value
- *entries of 4 tokens*: each window of so many tokens also has one compressed key and value
- *shared kv*: values are the keys before norm and rotary embedding
- *sinks*: a learned score per head without a value (attention sink)
- *block-sparse*: per KV head, an index head chooses blocks of tokens
- *index heads over groups*: index heads choose groups of consecutive tokens
- *relative logits*: learned scores of distances, in place of a rotary embedding
- *shared latents*: several layers attend to the latents of one
- *no rotation*: no rotary embedding
- *gate*: the result of attention is multiplied by a gate, per head or per element

Terms of the column "router":

- *+ bias*: a bias is added to scores when experts are chosen, not to weights
- *4 of 8 groups*: experts are chosen from the 4 best of 8 groups of experts
- *renormalized*: the weights of a token's experts sum to 1
- *softmax selected*: a softmax over the chosen experts only
- *sigmoid selected*: experts are chosen by logits, and weighed by sigmoids of logits
- *sqrt softplus*: the square root of log(1 + e^logit)
- *sparsemixer*: Phi-3.5-MoE's: for each choice a softmax over the experts whose logits are near it
- *x 2.5*: the weights are multiplied by 2.5

| architecture | mixers | KV | layers see | experts | router | int8 KV | MTP |
|---|---|---|---|---|---|---|---|
"""


_GEMMA: dict[str, object] = {
    "attention_k_eq_v": True, "enable_moe_block": True, "hidden_size_per_layer_input": 0,
    "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
    "num_global_key_value_heads": 2, "num_key_value_heads": 8, "sliding_window": 1024,
    "top_k_experts": 8,
}  # fmt: skip
_QSA: dict[str, object] = {
    "indexer_budget": 2048, "indexer_compress_ratio": 4, "indexer_head_dim": 128,
    "indexer_kv_heads": 1, "indexer_n_heads": 4, "partial_rotary_factor": 0.25,
}  # fmt: skip
_AFTER_THREE = [0] * 3 + [1] * 57  # layers of MiniMax-M3
_MINIMAX_M3: dict[str, object] = {
    "moe_layer_freq": _AFTER_THREE,
    "sparse_attention_config": {"sparse_attention_freq": _AFTER_THREE},
}
# Keys of published checkpoints, where the default configuration makes no model or another kind.
PUBLISHED: dict[str, dict[str, object]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "moe_intermediate_size": 1536},
    "Dots1ForCausalLM": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "Gemma4ForCausalLM": _GEMMA,
    "Gemma4ForConditionalGeneration": _GEMMA,
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4vMoeForConditionalGeneration": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 64, "moe_topk": 8, "num_key_value_heads": 8},
    "Lfm2MoeForCausalLM": {
        "layer_types": [
            "full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)
        ],
        "num_hidden_layers": 24,
    },
    "LLaDA2MoeModelLM": {"num_nextn_predict_layers": 0},
    "MiniMaxM1ForCausalLM": {"postnorm": True},
    "MiniMaxM3SparseForConditionalGeneration": _MINIMAX_M3,
    "MiniMaxM3VLForCausalLM": _MINIMAX_M3,
    "MiniMaxText01ForCausalLM": {"postnorm": True},
    "Mistral3ForConditionalGeneration": {"model_type": "mistral4"},
    "Qwen4ExpForCausalLM": _QSA,
    "Qwen4ExpForConditionalGeneration": _QSA,
    "SDARMoeForCausalLM": {"mtp_num_hidden_layers": 0},
}
ONE_HEAD: dict[str, object] = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}


# Mixers that are no `Attention`
KINDS = {
    "ConvolvedAttention": "attention to convolved heads",
    "ConvolvedHeads": "convolutions of queries, keys and values",
    "GatedDelta": "gated delta net",
    "KimiDelta": "Kimi delta attention",
    "Lightning": "lightning attention",
    "Mamba1": "Mamba",
    "Mamba2": "Mamba-2",
    "MixtureOfAttention": "mixture of attention heads",
    "NgramEmbedding": "n-gram embeddings",
    "OutputConv": "convolution of the output",
    "ShortConv": "short convolution",
}
# Kinds of `Attention`
ATTENTION = {
    "BlockSparseAttention": "block-sparse",
    "ClippedAttention": "relative logits, clipped heads",
    "GroupIndexedAttention": "index heads over groups",
    "RelativeAttention": "relative logits",
}


def default_spec(architecture: str) -> ModelSpec:
    """Return the spec of the default configuration, with an MTP head if there may be one."""
    keys: dict[str, object] = ONE_HEAD | PUBLISHED.get(architecture, {})
    if FAMILIES[architecture].text:
        keys = {FAMILIES[architecture].text: keys}
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": [architecture], "dtype": "bfloat16", **keys}
        Path(folder, "config.json").write_text(json.dumps(config))
        return read_model_spec(Path(folder))


def _kind(mixer: Mixer) -> str:
    if isinstance(mixer, LatentAttention):
        latent = f"latent, {mixer.num_heads} heads, rank {mixer.rank} + {mixer.rope_dim}"
        index = mixer.indexer
        return f"{latent}, {index.num_heads} index heads of {index.dim}" if index else latent
    if isinstance(mixer, SharedLatentAttention):
        return (
            f"shared latents, {mixer.num_heads} heads, rank {mixer.rank} + {mixer.rope_dim}, "
            f"{mixer.index_heads} index heads of {mixer.index_dim}"
        )
    if isinstance(mixer, CompressedAttention):
        kind = f"one key and value, {mixer.num_heads} heads of {mixer.head_dim}, sinks"
        kind += f", entries of {mixer.every} tokens" if mixer.every else ""
        if mixer.indexer:
            kind += f", {mixer.indexer.num_heads} index heads of {mixer.indexer.dim}"
        return kind
    if not isinstance(mixer, Attention):
        return f"{KINDS[type(mixer).__name__]}, {mixer.sharing}"
    options = [f"{mixer.num_heads}/{mixer.num_kv_heads} heads of {mixer.head_dim}"]
    if mixer.value_dim != mixer.head_dim:
        options[0] += f", values of {mixer.value_dim}"
    name_of_kind = ATTENTION.get(type(mixer).__name__)
    options += [name_of_kind] if name_of_kind else []
    options += ["no rotation"] if mixer.rope is None else []
    options += [f"{mixer.qk_norm} norms"] if mixer.qk_norm != "none" else []
    options += [
        name.replace("_", " ")
        for name in ("sinks", "shared_kv", "value_norm")
        if getattr(mixer, name)
    ]
    options += [f"gate per {mixer.gate}"] if mixer.gate != "none" else []
    return ", ".join(options)


def _sees(mixer: Mixer) -> str:
    if isinstance(mixer, BlockSparseAttention):
        return f"{mixer.top_k} chosen blocks of {mixer.block_size} tokens"
    if isinstance(mixer, SharedLatentAttention):
        return f"{mixer.top_k} chosen tokens"
    if isinstance(mixer, LatentAttention | GroupIndexedAttention) and mixer.indexer:
        return f"{mixer.indexer.top_k} chosen tokens"
    if isinstance(mixer, CompressedAttention):
        entries = f" and {mixer.indexer.top_k} chosen entries" if mixer.indexer else " and entries"
        return f"window {mixer.window}" + (entries if mixer.every else "")
    rule = mixer.rule
    if rule.tile:
        return "a state"
    return (
        f"window {rule.window}" if rule.window else f"chunk {rule.chunk}" if rule.chunk else "all"
    )


def _kept(mixer: Mixer) -> str:
    if isinstance(mixer, CompressedAttention):
        states = mixer.tiled_state(1) if mixer.every else mixer.cache(1)
        state = sum(tensor.heads * tensor.width for tensor in states if tensor.per_tile)
        entries = sum(part.dim for part in mixer.compressors)
        return f"{entries} per {mixer.every} + state {state}" if mixer.every else f"state {state}"
    tensors = [tensor for tensor in mixer.cache(1) if tensor.per_tile or not mixer.rule.tile]
    return ("state " if mixer.rule.tile else "") + str(
        sum(tensor.heads * tensor.width for tensor in tensors)
    )


def _distinct(words: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(words))


def _router(moe: MoE) -> str:
    rule = moe.router
    words = [rule.score.replace("_", " ")]
    words += ["+ bias"] * rule.bias + [f"{rule.kept_groups} of {rule.groups} groups"] * (
        rule.groups > 1
    )
    words += ["renormalized"] * rule.renormalize + [f"x {rule.scale:g}"] * (rule.scale != 1)
    return ", ".join(words)


def row(architecture: str) -> str:
    """Return a family's line of the table."""
    spec = default_spec(architecture)
    mixers = [layer.mixer for layer in spec.layers]
    kv = _distinct([_kept(mixer) for mixer in mixers])
    experts = "-"
    router = "-"
    if spec.moe:
        experts = f"{spec.moe.top_k} of {spec.moe.num_experts}"
        experts += f" + shared {spec.moe.shared.size}" if spec.moe.shared else ""
        router = _router(spec.moe)
    int8 = "no" if any(mixer.cache_obstacle("int8") for mixer in mixers) else "yes"
    cells = (
        architecture,
        _distinct([_kind(m) for m in mixers]),
        kv,
        _distinct([_sees(m) for m in mixers]),
    )
    return (
        "| "
        + " | ".join((*cells, experts, router, int8, "no" if spec.mtp is None else "yes"))
        + " |"
    )


def text() -> str:
    """Return the whole file."""
    return HEAD + "\n".join(row(architecture) for architecture in sorted(FAMILIES)) + "\n"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], PATH, text, "python -m tools.models_table"))
