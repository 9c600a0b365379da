"""Families and formats as they are served: over HTTP, by two engines that share the experts, one of
which is killed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moeserve import LLM, SamplingParams
from tests.quantized_checkpoints import FORMS, write_quantized

from .conftest import running_server
from .test_expert_parallel import BOOT_S, engines, tokens
from .test_faults import until

PROMPTS = [[3 + (7 * i + j) % 250 for j in range(40 + 9 * i)] for i in range(4)]
NUM_TOKENS = 60
FORMATS = [name for name in FORMS if name.startswith(("fp4", "int4, ", "int8, ", "fp8"))]
FAMILIES = [
    "deepseek_v3",
    "granite_moe_hybrid",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe",
    "kimi_linear",
    "nemotron_h",
    "jamba",
    "lfm2_moe",
    "bailing_moe_v2_5",
    "bailing_moe_linear_v2",
    "bailing_hybrid",
    "glm5_next",
    "hy_v4",
    "deepseek_v32",
    "deepseek_v4",
    "glm_moe_dsa",
    "ernie4_5_vl_moe",
    "flint",
    "glm4v_moe",
    "granite_moe_swa",
    "kolibri1",
    "lara_mini",
    "sarvam_mla",
    "sarvam_moe",
    "qwen4_exp",
    "dbrx",
    "jetmoe",
    "laguna",
    "longcat_flash",
    "minimax",
    "zaya",
]
CASES = [*((family, "") for family in FAMILIES), *(("qwen3_moe", form) for form in FORMATS)]


def body(index: int) -> dict[str, Any]:
    sampling = {"temperature": 0.8, "seed": index, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {"prompt": PROMPTS[index], **sampling}


def alone(path: Path) -> list[list[int]]:
    """Return one engine's answer to each prompt, one after the other."""
    with LLM(str(path), skip_tokenizer_init=True, max_model_len=256) as llm:
        answers = []
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0.8, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
            answers.append(
                llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids
            )
        return answers


@pytest.mark.full("models", keep=2)
@pytest.mark.timeout(360)
@pytest.mark.parametrize(("family", "form"), CASES)
async def test_two_engines_say_what_one_says_though_one_dies(
    family: str, form: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint(family).path
    if form:
        (tmp_path / "model").mkdir()
        path, _ = write_quantized(path, tmp_path / "model", FORMS[form])
    expected = await asyncio.to_thread(alone, path)
    (tmp_path / "config.yaml").write_text("model: {skip_tokenizer_init: true}\n")
    flags = ("--config", str(tmp_path / "config.yaml"), "--dp", "2", "--max-model-len", "256")
    flags = (*flags, "--served-model-name", "demo", "--kv-cache-bytes", "16MiB")
    with running_server(tmp_path / "log", str(path), *flags) as server:
        async with aiohttp.ClientSession() as session:
            seen: list[list[int]] = [[] for _ in PROMPTS]
            streams = [
                asyncio.create_task(tokens(session, server.url, body(i), mine))
                for i, mine in enumerate(seen)
            ]
            await until(lambda: all(len(mine) >= 5 for mine in seen), 30)
            engines(server)[0].kill()
            assert await asyncio.gather(*streams) == expected
        await until(lambda: server.get("/readyz")[0] == 200, BOOT_S)
