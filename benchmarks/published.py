"""The roofline's predictions beside published throughput and times of other engines on GPUs.

    python -m benchmarks.published [--tables DIR]

Each row names its source. The two rows marked as fitted set `in_situ` in moeserve/plan/hardware.py;
no other row sets a number of the model. Layouts that shard experts by columns (TP) are omitted,
because moeserve does not run them. Where those engines expand latents for prompts, so does the
prediction; moeserve attends to the latents themselves (docs/planning.md).

The share of peak operations that 16-bit expert kernels reach was set so that the roofline is right
at the median of other shapes in aiconfigurator-core's tables of H100 and H200. --tables computes
that again, and adds predictions that use the tables to each row.

Prints and saves all rows, and the median and worst error of those that are not fitted.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import parser, save
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.config import Config, config_of
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec
from moeserve.plan.candidates import Candidate, Workload
from moeserve.plan.hardware import DEVICES, LINKS, Device
from moeserve.plan.memory import rank_memory
from moeserve.plan.roofline import Roofline, Shape
from moeserve.plan.tables import KernelTables, read_tables

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 163840, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
    "rope_theta": 10000, "eos_token_id": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "eos_token_id": 151645,
}  # fmt: skip
H100_NVL = replace(
    DEVICES["h100"], name="H100 NVL", memory=94 * 10**9, bytes_per_s=3.9e12, flops=835e12
)
# Measured kernels by device: filled by --tables for a second prediction of each row.
MEASURED: dict[str, KernelTables] = {}
BLOG = "lm-sys blog, 2025-05-05"
PROFILE = "deepseek-ai profile-data, in the " + BLOG
PREFILLS = ((1024, 57_700), (2048, 54_500), (4096, 50_300))


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--tables",
        help="systems/data of aiconfigurator-core, or aiconfigurator for the installed one",
    )
    args = flags.parse_args()
    rows = list(table())
    errors = [abs(row["error"]) for row in rows if not row["fitted"]]
    result: dict[str, Any] = {
        "rows": rows,
        "median_error": median(errors),
        "worst_error": max(errors),
    }
    if args.tables:
        result["other_shapes"] = [other_shapes(args.tables, name) for name in ("h100", "h200")]
        MEASURED.update(
            {name: read_tables(args.tables, DEVICES[name]) for name in ("h100", "h200")}
        )
        for row, measured in zip(rows, table(), strict=True):
            row |= {
                "predicted_with_tables": measured["predicted"],
                "error_with_tables": measured["error"],
            }
    save("published", args, result)


def table() -> list[dict[str, Any]]:
    """Return each row with its error."""
    v3 = spec_of(DEEPSEEK_V3)
    qwen = spec_of(QWEN3_30B)
    h100 = DEVICES["h100"]
    h200 = DEVICES["h200"]
    tensorrt = served(
        v3,
        h200,
        dp=8,
        num_input=1000,
        num_output=1000,
        rows=1024,
        tokens=2048,
        kv_tokens=900_000,
    )
    rows = [
        row(
            "DeepSeek profile, H800, prefill EP32, 4k prompts, tokens/s/node",
            PROFILE,
            published=62_713,
            predicted=8 * prefill(v3, h100, dp=32, tokens=16_384, length=4096),
        ),
        row(
            "DeepSeek profile, H800, decode EP128, 128 rows, 4k, tokens/s/node",
            PROFILE,
            published=18_598,
            predicted=8 * decode(v3, h100, dp=128, rows=128, context=4096),
        ),
        row(
            "SGLang, 96 H100, decode EP72, 256 rows, 2k, tokens/s/node",
            BLOG,
            published=22_282,
            predicted=8 * decode(v3, h100, dp=72, rows=256, context=2048),
            fitted=True,
        ),
        *(
            row(
                f"SGLang, 96 H100, prefill EP32, {n // 1024}k prompts, tokens/s/node",
                BLOG,
                published=there,
                predicted=8 * prefill(v3, h100, dp=32, tokens=16_384, length=n),
                fitted=n == 4096,
            )
            for n, there in PREFILLS
        ),
        row(
            "TensorRT-LLM, 8 H200, R1 fp8 DEP8, 1000/1000, output tokens/s/GPU",
            "TensorRT-LLM perf overview",
            published=1627,
            predicted=tensorrt * 1000 / 8,
        ),
        row(
            "vLLM, H100 NVL, Qwen3-30B-A3B, 4096/8, requests/s",
            "vllm#54742",
            published=9.15,
            predicted=served(qwen, H100_NVL, num_input=4096, num_output=8, rows=256),
        ),
        row(
            "vLLM, H100 NVL, Qwen3-30B-A3B, 128/1024, 256 rows, requests/s",
            "vllm#54742",
            published=6.35,
            predicted=served(qwen, H100_NVL, num_input=128, num_output=1024, rows=256),
        ),
        row(
            "vLLM, H100 NVL, Qwen3-30B-A3B, 1024/128, 64 rows, requests/s",
            "vllm#54742",
            published=15.1,
            predicted=served(qwen, H100_NVL, num_input=1024, num_output=128, rows=64),
        ),
    ]
    tokens = {64: 0.316, 512: 0.350, 4096: 0.691, 16384: 2.463}
    rows += [
        row(
            f"vLLM experts, H200, 128 of 768 x 2048, {t} tokens, ms",
            "aiconfigurator-core",
            published=there,
            predicted=expert_ms(qwen, h200, t),
        )
        for t, there in tokens.items()
    ]
    return rows


def row(
    what: str, source: str, *, published: float, predicted: float, fitted: bool = False
) -> dict[str, Any]:
    return {
        "what": what,
        "source": source,
        "published": published,
        "predicted": round(predicted, 3),
        "fitted": fitted,
        "error": round(predicted / published - 1, 4),
    }


def spec_of(values: dict[str, Any]) -> ModelSpec:
    """Return the spec of a config.json."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values), "utf-8")
        return read_model_spec(Path(folder))


def cost_of(
    spec: ModelSpec, device: Device, dp: int, tp: int = 1, **settings: Any
) -> tuple[Config, Roofline]:
    config = config_of("model", dp=dp, tp=tp, max_model_len=8192, **settings)
    return config, Roofline(
        spec, config, device, LINKS["ib400"], 8, tables=MEASURED.get(device.name.lower())
    )


def prefill(spec: ModelSpec, device: Device, dp: int, tokens: int, length: int) -> float:
    """Return prompt tokens per second per device."""
    _, cost = cost_of(spec, device, dp)
    mixer = spec.layers[0].mixer
    if isinstance(mixer, LatentAttention):  # expanded to keys and values, as in these engines
        operations = 2 * mixer.num_heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
        cost.attention_layers = [
            replace(layers, operations=operations) for layers in cost.attention_layers
        ]
    rows = tokens // length
    shape = Shape(
        num_tokens=tokens,
        num_rows=rows,
        num_samples=rows,
        num_reads=(float(tokens),),
        num_pairs=(tokens * length / 2,),
    )
    return tokens / cost.seconds([shape] * dp)


def step(spec: ModelSpec, device: Device, dp: int, rows: int, context: int) -> float:
    """Return the seconds of a step in which each engine decodes `rows` requests."""
    _, cost = cost_of(spec, device, dp)
    positions = (float(rows * context),)
    shape = Shape(
        num_tokens=rows,
        num_rows=rows,
        num_samples=rows,
        num_reads=positions,
        num_pairs=positions,
    )
    return max(cost.seconds([shape] * dp), cost.host_seconds(shape))


def decode(spec: ModelSpec, device: Device, dp: int, rows: int, context: int) -> float:
    """Return output tokens per second per device."""
    return rows / step(spec, device, dp, rows, context)


def served(
    spec: ModelSpec,
    device: Device,
    *,
    dp: int = 1,
    num_input: int,
    num_output: int,
    rows: int,
    tokens: int = 8192,
    kv_tokens: int = 0,
) -> float:
    """Return the most requests per second of all engines together, in closed form.

    Each engine runs at most `rows` requests at once and `tokens` tokens per step. kv_tokens limits
    the KV cache; 0 leaves its size to the device's memory.
    """
    config, cost = cost_of(spec, device, dp, max_num_seqs=rows, max_num_batched_tokens=tokens)
    memory = rank_memory(spec, config, device)
    if kv_tokens:
        memory = replace(
            memory, limits=replace(memory.limits, num_blocks=kv_tokens // memory.limits.block_size)
        )
    return Candidate(config, memory=memory, cost=cost).capacity(
        Workload(1.0, num_input, num_output)
    )


def expert_ms(spec: ModelSpec, device: Device, tokens: int) -> float:
    """Return the milliseconds of one layer's experts alone."""
    _, cost = cost_of(spec, replace(device, in_situ=1.0), 1)
    return (
        1e3
        * cost.terms([Shape(tokens, 1, 0, (0.0,), (0.0,))])["experts"]
        / cost.weights.num_moe_layers
    )


def other_shapes(source: str, name: str) -> dict[str, Any]:
    """Return the roofline's errors for 16-bit experts of other shapes, where operations dominate.

    Entries that would read experts faster than memory allows are omitted: those experts must have
    two matrices instead of three.
    """
    device = DEVICES[name]
    errors = []
    shares: list[float] = []
    for (dtype, width, inner, experts, top_k), times in read_tables(source, device).experts.items():
        weights = 3 * width * inner
        own = (width, inner, experts, top_k) == (2048, 768, 128, 8)
        if (
            dtype != "bfloat16"
            or own
            or 2 * weights * experts / times.seconds(1024) > device.bytes_per_s
        ):
            continue
        for tokens in (4096, 8192, 16384):
            reads_s = 2 * weights * experts / (device.read_share * device.bytes_per_s)
            computes_s = 2 * weights * tokens * top_k / (device.expert_share * device.flops)
            if computes_s > reads_s:
                took_s = times.seconds(tokens)
                errors.append((computes_s + (1 - device.overlap) * reads_s) / took_s - 1)
                shares.append(
                    device.expert_share * computes_s / (took_s - (1 - device.overlap) * reads_s)
                )
    return {
        "device": name,
        "points": len(errors),
        "median_error": round(median(errors), 4),
        "median_size": round(median(map(abs, errors)), 4),
        "share": round(median(shares), 3),
    }


if __name__ == "__main__":
    main()
