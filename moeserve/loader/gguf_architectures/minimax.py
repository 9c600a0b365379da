"""MiniMax-M2."""

from moeserve.loader.gguf_architecture import SIGMOID, GGUFArchitecture, Variants

ARCHITECTURES: dict[str, Variants] = {
    "minimax-m2": {
        "": GGUFArchitecture(
            "MiniMaxM2ForCausalLM",
            keys={"expert_feed_forward_length": "intermediate_size"},
            gating=SIGMOID,
        )
    },
}
