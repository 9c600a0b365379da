"""DeepSeek-V2, V3 and V3.2, and the models with their layers: Kimi-K2, GLM-4.7-Flash, dots.llm1,
Mistral-Large-3.
"""

from moeserve.loader.gguf_architecture import SIGMOID, GGUFArchitecture, Variants
from moeserve.loader.gguf_architectures import mistral

INDEXER_KEYS = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
INDEXER_NAMES = {
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
ARCHITECTURES: dict[str, Variants] = {
    "deepseek2": {
        mistral.SLOPE: mistral.MISTRAL_4,
        "sigmoid": GGUFArchitecture("DeepseekV3ForCausalLM", gating=SIGMOID),
        "": GGUFArchitecture("DeepseekV2ForCausalLM"),
    },
    "deepseek32": {
        "": GGUFArchitecture(
            "DeepseekV32ForCausalLM",
            keys=INDEXER_KEYS,
            required=("attention.q_lora_rank", *INDEXER_KEYS),
            gating=SIGMOID,
            names=INDEXER_NAMES,
        )
    },
    "dots1": {"": GGUFArchitecture("Dots1ForCausalLM", gating=SIGMOID)},
}
