"""The template for DeepSeek-V3.2, whose checkpoint has none. Expected texts follow its published
encoder.
"""

from __future__ import annotations

import json

import pytest

from moeserve.errors import InvalidRequest
from moeserve.text.chat_template import ChatTemplate

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLS = [
    {"function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2], "long": True}}},
    {"function": {"name": "weather", "arguments": {"city": "Rom"}}},
]
CALLED = """

<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>
<｜DSML｜parameter name="long" string="false">true</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Rom</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
RESULTS = (
    "\n\n<function_results>\n<result>21</result>\n<result>30</result>\n</function_results>\n\n"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "greet"},
    {"role": "user", "content": "Warm?"},
    {"role": "assistant", "reasoning_content": "look it up", "tool_calls": CALLS},
    {"role": "tool", "content": "21"},
    {"role": "tool", "content": "30"},
]


@pytest.fixture
def template(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v32"}))
    return ChatTemplate.load(tmp_path)


def test_it_is_used_only_where_a_checkpoint_has_none(tmp_path, template):
    assert "DSML" in template.source
    (tmp_path / "chat_template.jinja").write_text("mine")
    assert ChatTemplate.load(tmp_path).source == "mine"


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_thinking(template, byte_level, name):
    begin = f"{BOS}Be brief.{USER}Hi{ASSISTANT}</think>Hello.{EOS}{USER}Warm?{ASSISTANT}"
    text = template.render(byte_level, CHAT, kwargs={name: True})
    assert text == f"{begin}<think>look it up</think>{CALLED}{EOS}{RESULTS}<think>"
    assert template.render(byte_level, CHAT) == f"{begin}</think>{CALLED}{EOS}{RESULTS}</think>"
    assert template.render(byte_level, CHAT[:4], add_generation_prompt=False) == begin.removesuffix(
        ASSISTANT
    )


def test_tools_follow_the_system_message(template, byte_level):
    text = template.render(byte_level, CHAT[:2], tools=TOOLS)
    assert text.startswith(f"{BOS}Be brief.\n\n## Tools\n\nYou have access")
    assert text.endswith(
        f"<functions>\n{json.dumps(TOOLS[0]['function'])}\n</functions>\n{USER}Hi{ASSISTANT}</think>"
    )
    assert template.render(byte_level, CHAT[1:2], tools=TOOLS) == text.replace("Be brief.", "")


def test_continuing(template, byte_level):
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = template.render(byte_level, CHAT[1:3], **options)
    assert text == f"{BOS}{USER}Hi{ASSISTANT}</think>Hello."


def test_what_it_rejects(template, byte_level):
    with pytest.raises(InvalidRequest, match="unknown role"):
        template.render(byte_level, [{"role": "critic", "content": ""}])
