"""Prompts of a tekken checkpoint without a template have the ids that mistral-common gives them.

Skipped without mistral-common: up to Python 3.12 it wants a NumPy older than the one that the other
tests run with.
"""

from __future__ import annotations

import json

import pytest

from moeserve.text.chat_template import ChatTemplate
from moeserve.text.tokenizer import Tokenizer
from tests.text.test_byte_bpe import tekken

# fmt: off
SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]", # from version 11 on
    "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]",
]
# fmt: on
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "\u00e9 [INST]", "parameters": {"type": "object"}},
    }
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": {"city": "K\u00f6ln"}},
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the fox's </s> \u6f22\u5b57 [INST]"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "21"},
    {"role": "assistant", "content": "21."},
    {"role": "user", "content": "  in\n"},
]


@pytest.mark.parametrize("version", ["v7", "v13", "v15"])
def test_ids_equal_mistral_common(tmp_path, version):
    pytest.importorskip("mistral_common")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    effort = {"type": "enum", "values": ["none", "high"], "default": "none", "accepts_none": True}
    spec = json.loads((tekken(tmp_path) / "tekken.json").read_text())
    spec["config"] |= {
        "version": version,
        "default_num_special_tokens": 40,
        "default_vocab_size": 40 + len(spec["vocab"]),
    }
    special = SPECIAL[:20] if version == "v7" else SPECIAL
    spec["special_tokens"] = [
        {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(special)
    ]
    if version == "v15":
        spec["model_settings_builder"] = {"reasoning_effort": effort}
    tekken(tmp_path, **spec)
    tokenizer = Tokenizer.load(tmp_path)
    template = ChatTemplate.load(tmp_path)
    theirs = MistralTokenizer.from_file(tmp_path / "tekken.json")
    for num_messages, tools in ((2, None), (2, TOOLS), (4, TOOLS), (6, TOOLS)):
        messages = json.loads(json.dumps(CHAT[:num_messages]))
        for call in (call for message in messages for call in message.get("tool_calls", [])):
            call["function"]["arguments"] = json.dumps(
                call["function"]["arguments"], ensure_ascii=False
            )
        request = ChatCompletionRequest.from_openai(messages, tools=tools)
        expected = theirs.encode_chat_completion(request).tokens
        assert template.encode(tokenizer, CHAT[:num_messages], tools=tools) == expected
