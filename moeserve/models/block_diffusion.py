"""Models that decode blocks of tokens from masks: SDAR-MoE and LLaDA2 (docs/diffusion.md).

SDAR-MoE is Qwen3-MoE, and LLaDA2 is Ling 2.0, but their tokens also see the later tokens of their
block. Published checkpoints do not say the length of a block and the mask, so both are the
constants of their authors, unless config.json has `block_size` and `mask_token_id`.

Source: SDAR (arXiv 2510.06303), LLaDA2.0 (arXiv 2512.15745).
"""

from dataclasses import replace

from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.bailing_moe import LING_2
from moeserve.models.qwen3_moe import QWEN3_MOE
from moeserve.models.spec import BlockDiffusion

_MAX_BLOCK = 64


def _in_blocks(config: Fields, fields: family.SpecFields) -> family.SpecFields:
    """Return the fields of a causal model for one that decodes blocks."""
    block = config.integer("block_size", 2, _MAX_BLOCK)
    if _MAX_BLOCK % block:
        raise config.error("block_size", f"it must divide {_MAX_BLOCK}")
    config.integer("max_position_embeddings", block, family.MAX_POSITION)
    vocab_size = config.integer("vocab_size", 1, family.MAX_POSITION)
    diffusion = BlockDiffusion(
        block=block, mask_id=config.integer("mask_token_id", 0, vocab_size - 1)
    )
    rule = KVRule(diffusion_block=block)
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, rule=rule)) for layer in fields["layers"]
    )
    return fields | {"layers": layers, "diffusion": diffusion}


def _sdar_moe(config: Fields) -> family.SpecFields:
    config.only(mtp_num_hidden_layers=0, use_sliding_window=False)
    return _in_blocks(config, QWEN3_MOE.fields(config))


def _llada2(config: Fields) -> family.SpecFields:
    config.only(norm_head=False, num_nextn_predict_layers=0, use_sliding_window=False)
    config.unsupported("expert_capacity", "routers that choose experts per block are not supported")
    # A window that is switched off, and that Ling does not have.
    values = {key: value for key, value in config.values.items() if key != "sliding_window"}
    return _in_blocks(config, LING_2.fields(replace(config, values=values)))


SDAR_MOE = replace(
    QWEN3_MOE,
    architecture="SDARMoeForCausalLM",
    model_type="sdar_moe",
    fields=_sdar_moe,
    defaults=QWEN3_MOE.defaults | {"block_size": 4, "mask_token_id": 151669},
)
LLADA2 = replace(
    LING_2,
    architecture="LLaDA2MoeModelLM",
    model_type="llada2_moe",
    fields=_llada2,
    defaults=LING_2.defaults
    | {
        "block_size": 32,
        "first_k_dense_replace": 0,
        "mask_token_id": 156895,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "routed_scaling_factor": 2.5,
    },
)
