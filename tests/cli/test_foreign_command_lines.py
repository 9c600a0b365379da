"""Command lines that people copy from recipes of vLLM, SGLang and llama.cpp.

Each is accepted with the settings that it means, or refused with a reason for each flag.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from moeserve.cli.main import build_parser, parse
from moeserve.cli.settings import resolve
from moeserve.errors import ConfigError

PARSER = build_parser("serve")

ACCEPTED: dict[str, dict[str, Any]] = {
    # vLLM
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8 --tensor-parallel-size 4 --max-model-len 262144"
    " --enable-expert-parallel": {"tp": 4, "max_model_len": 262_144, "ep": "on"},
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8 --max-model-len 131072 --enable-expert-parallel"
    " --data-parallel-size 8 --enable-auto-tool-choice --tool-call-parser qwen3_coder": {
        "dp": 8,
        "max_model_len": 131_072,
        "ep": "on",
    },
    "Qwen/Qwen3.6-35B-A3B --tensor-parallel-size 8 --max-model-len 262144 --reasoning-parser qwen3"
    ' --speculative-config \'{"method": "mtp", "num_speculative_tokens": 2}\'': {
        "tp": 8,
        "max_model_len": 262_144,
        "speculate": "mtp:2",
    },
    "Qwen/Qwen3-Next-80B-A3B-Instruct --tensor-parallel-size 4 --served-model-name qwen3-next"
    " --tokenizer-mode auto --gpu-memory-utilization 0.8 --no-enable-chunked-prefill"
    ' --speculative-config \'{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}\'': {
        "tp": 4,
        "served_model_name": "qwen3-next",
        "memory_utilization": 0.8,
        "speculate": "mtp:2",
    },
    "deepseek-ai/DeepSeek-V3.2 --tokenizer-mode deepseek_v32 --tensor-parallel-size 8"
    " --tool-call-parser deepseek_v32 --enable-auto-tool-choice --reasoning-parser deepseek_v3"
    " --kv-cache-dtype bfloat16": {"tp": 8, "kv_cache_dtype": "float"},
    "deepseek-ai/DeepSeek-R1 --data-parallel-size 8 --enable-expert-parallel --async-scheduling"
    " --all2all-backend deepep_low_latency --enable-eplb --enable-dbo"
    ' --eplb-config \'{"window_size":1000,"step_interval":3000,"num_redundant_experts":32}\''
    " --dbo-decode-token-threshold 32 --no-enable-prefix-caching": {
        "dp": 8,
        "ep": "on",
        "all2all": "deepep_ll",
        "rebalance": "auto",
        "redundant_experts": 32,
        "dbo": "on",
        "enable_prefix_caching": False,
    },
    "openai/gpt-oss-120b --tensor-parallel-size 2 --async-scheduling --stream-interval 20"
    " --max-cudagraph-capture-size 2048 --max-num-batched-tokens 8192"
    " --tool-call-parser openai --reasoning-parser openai_gptoss --enable-auto-tool-choice": {
        "tp": 2,
        "max_num_batched_tokens": 8192,
    },
    "zai-org/GLM-4.5-Air --tensor-parallel-size 8 --tool-call-parser glm45"
    " --reasoning-parser glm45 --enable-auto-tool-choice --served-model-name glm-4.5-air": {
        "tp": 8,
        "served_model_name": "glm-4.5-air",
    },
    "zai-org/GLM-4.6-FP8 -tp 4 --speculative-config.method mtp"
    " --speculative-config.num_speculative_tokens 1 --max-num-seqs 64": {
        "tp": 4,
        "speculate": "mtp:1",
        "max_num_seqs": 64,
    },
    "moonshotai/Kimi-K2-Instruct --port 8000 --served-model-name kimi-k2 --trust-remote-code"
    " --tensor-parallel-size 16 --enable-auto-tool-choice --tool-call-parser kimi_k2": {
        "tp": 16,
        "port": 8000,
        "served_model_name": "kimi-k2",
    },
    "MiniMaxAI/MiniMax-M2 --tensor-parallel-size 4 --tool-call-parser minimax_m2"
    " --reasoning-parser minimax_m2_append_think --enable-auto-tool-choice"
    ' --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\' -O3': {"tp": 4},
    "org/x --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 -tp 16 --enforce-eager": {
        "nnodes": 2,
        "node_rank": 1,
        "rendezvous": "10.0.0.1:29501",
        "tp": 16,
        "graphs": "off",
    },
    # SGLang
    "--model deepseek-ai/DeepSeek-V3.2-Exp --tp 8 --dp 8 --enable-dp-attention": {
        "dp": 8,
        "tp": 1,
    },
    "--model-path deepseek-ai/DeepSeek-R1 --tp 16 --dist-init-addr 10.0.0.1:5000 --nnodes 2"
    " --node-rank 0 --trust-remote-code": {
        "tp": 16,
        "rendezvous": "10.0.0.1:5000",
        "nnodes": 2,
        "node_rank": 0,
    },
    "--model-path zai-org/GLM-4.5-Air-FP8 --tp-size 4 --tool-call-parser glm45"
    " --reasoning-parser glm45 --speculative-algorithm EAGLE --speculative-num-steps 3"
    " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --mem-fraction-static 0.7"
    " --disable-shared-experts-fusion --served-model-name glm --host 0.0.0.0 --port 8000": {
        "tp": 4,
        "speculate": "mtp:3",
        "memory_utilization": 0.7,
        "served_model_name": "glm",
        "host": "0.0.0.0",
        "port": 8000,
    },
    "--model Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4 --context-length 262144"
    " --mem-fraction-static 0.8 --speculative-algo NEXTN --speculative-num-steps 3"
    " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4": {
        "tp": 4,
        "max_model_len": 262_144,
        "memory_utilization": 0.8,
        "speculate": "mtp:3",
    },
    "--model-path deepseek-ai/DeepSeek-V3-0324 --trust-remote-code --moe-a2a-backend deepep"
    " --deepep-mode normal --tp-size 16 --ep-size 16 --chunked-prefill-size 65536"
    " --max-running-requests 2048 --disable-radix-cache --ep-num-redundant-experts 32"
    " --enable-eplb --eplb-algorithm deepseek --ep-dispatch-algorithm dynamic"
    " --enable-two-batch-overlap --cuda-graph-max-bs 256 --moe-dense-tp-size 1"
    " --enable-dp-lm-head --watchdog-timeout 1000000": {
        "tp": 16,
        "ep": "on",
        "all2all": "deepep_v2",
        "max_num_batched_tokens": 65536,
        "max_num_seqs": 2048,
        "enable_prefix_caching": False,
        "redundant_experts": 32,
        "rebalance": "auto",
        "dbo": "on",
    },
    "--model openai/gpt-oss-120b --tp 8 --reasoning-parser gpt-oss --tool-call-parser gpt-oss"
    " --attention-backend triton --speculative-algorithm EAGLE3"
    " --speculative-draft-model-path lmsys/EAGLE3-gpt-oss-120b-bf16 --speculative-num-steps 3"
    " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4": {
        "tp": 8,
        "attention_backend": "triton",
        "speculate": "eagle:lmsys/EAGLE3-gpt-oss-120b-bf16:3",
    },
    # llama.cpp
    "-m Qwen3-30B-A3B-Q4_K_M.gguf --jinja -ngl 99 -fa on -c 32768 --host 0.0.0.0 --port 8080": {
        "max_model_len": 32768,
        "host": "0.0.0.0",
        "port": 8080,
    },
    "-m x.gguf -c 65536 -np 4 -cb -ctk q8_0 -ctv q8_0 -t 16 -b 2048 -ub 512 --no-mmap --mlock"
    " --alias qwen --api-key k --metrics --no-webui --reasoning-format auto --no-warmup": {
        "max_model_len": 65536,
        "max_num_seqs": 4,
        "kv_cache_dtype": "int8",
        "threads": 16,
        "max_num_batched_tokens": 2048,
        "served_model_name": "qwen",
        "api_key": ("k",),
        "ui": False,
    },
}

REFUSED = {
    "Qwen/Qwen3.5-122B-A10B-FP8 --max-model-len 262144 --load-format instanttensor -tp 2"
    " --distributed-executor-backend ray": ["--distributed-executor-backend"],
    "openai/gpt-oss-120b --tensor-parallel-size 2 --kv-cache-dtype fp8": ["--kv-cache-dtype"],
    "zai-org/GLM-4.5-FP8 --tensor-parallel-size 8 --cpu-offload-gb 16": ["--cpu-offload-gb"],
    "deepseek-ai/DeepSeek-V3.1 -dp 16 --data-parallel-size-local 8 --headless"
    " --data-parallel-address 10.0.0.1 --data-parallel-rpc-port 13345 --enable-expert-parallel"
    " --data-parallel-start-rank 8": [
        "--data-parallel-size-local",
        "--headless",
        "--data-parallel-address",
        "--data-parallel-rpc-port",
        "--data-parallel-start-rank",
    ],
    "Qwen/Qwen3-30B-A3B --max-model-len 131072"
    ' --rope-scaling \'{"rope_type":"yarn","factor":4.0}\'': ["--rope-scaling"],
    "--model org/DeepSeek-R1-INT8 --trust-remote-code --disable-overlap-schedule --device cpu"
    " --quantization w8a8_int8 --mem-fraction-static 0.8 --max-total-tokens 65536 --tp 6": [
        "--max-total-tokens"
    ],
    "-hf unsloth/Qwen3-30B-A3B-GGUF:Q4_K_XL --jinja --temp 0.6 --min-p 0.0 -ot exps=CPU": [
        "--temp",
        "--min-p",
        "-ot",
    ],
    "-m gpt-oss-120b.gguf -c 0 -ncmoe 20 -fa on --jinja": ["-ncmoe"],
}


@pytest.mark.parametrize("line", ACCEPTED)
def test_a_recipe_means_these_settings(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = resolve(parse(PARSER, shlex.split(line)), {})
    sections = {path: path.partition(".")[::2] for path in found.origins}
    settings = {
        name: getattr(getattr(found.config, section), name) for section, name in sections.values()
    }
    model = settings.pop("model")
    assert model in line
    assert settings == ACCEPTED[line]
    # Each flag is moeserve's own, or a note says what it is.
    notes = capsys.readouterr().err
    for flag in re.findall(r"(?<= )-[-\w]*[a-z][-\w]*", f" {line}"):
        is_own = flag in PARSER._option_string_actions
        assert is_own or flag in notes or flag == "-O3", flag


@pytest.mark.parametrize("line", REFUSED)
def test_a_recipe_that_cannot_be_followed_is_refused_with_all_reasons(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(PARSER, shlex.split(line))
    message = str(caught.value)
    if len(REFUSED[line]) > 1:
        assert re.findall(r"^  (-[-\w]+)", message, re.MULTILINE) == REFUSED[line]
    else:
        assert message.startswith(REFUSED[line][0])
        assert " is not supported: " in message
