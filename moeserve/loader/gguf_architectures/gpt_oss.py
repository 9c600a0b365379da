"""gpt-oss."""

from moeserve.loader.gguf_architecture import SOFTMAX_OF_SELECTED, GGUFArchitecture, Variants

ARCHITECTURES: dict[str, Variants] = {
    "gpt-oss": {
        "": GGUFArchitecture(
            "GptOssForCausalLM",
            keys={"expert_feed_forward_length": "intermediate_size"},
            required=("attention.sliding_window",),
            gating=SOFTMAX_OF_SELECTED,
        )
    },
}
