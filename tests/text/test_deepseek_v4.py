"""The template for DeepSeek-V4, whose checkpoint has none. Expected texts follow its published
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
    {
        "id": "a",
        "function": {
            "name": "weather",
            "arguments": {"city": "Köln", "days": [1, 2], "long": True},
        },
    },
    {"id": "b", "function": {"name": "weather", "arguments": {"city": "Rom"}}},
]
CALLED = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>
<｜DSML｜parameter name="long" string="false">true</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Rom</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "greet"},
    {"role": "user", "content": "Warm?"},
    {"role": "assistant", "reasoning_content": "look it up", "tool_calls": CALLS},
    {"role": "tool", "content": "30", "tool_call_id": "b"},
    {"role": "tool", "content": "21", "tool_call_id": "a"},
    {"role": "user", "content": "Well?"},
]
# The results are in the order of the calls, in one turn of the user.
RESULTS = f"{USER}<tool_result>21</tool_result>\n\n<tool_result>30</tool_result>\n\nWell?"


@pytest.fixture
def template(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    return ChatTemplate.load(tmp_path)


def test_without_thinking(template, byte_level):
    text = template.render(byte_level, CHAT)
    assert text == (
        f"{BOS}Be brief.{USER}Hi{ASSISTANT}</think>Hello.{EOS}{USER}Warm?{ASSISTANT}</think>"
        f"{CALLED}{EOS}{RESULTS}{ASSISTANT}</think>"
    )
    shorter = template.render(byte_level, CHAT, add_generation_prompt=False)
    assert text == f"{shorter}{ASSISTANT}</think>"


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_reasoning_stays_in_the_last_turn_or_with_tools(template, byte_level, name):
    text = template.render(byte_level, CHAT[:4], kwargs={name: True})
    assert text == (
        f"{BOS}Be brief.{USER}Hi{ASSISTANT}</think>Hello.{EOS}{USER}Warm?{ASSISTANT}<think>"
    )
    text = template.render(byte_level, CHAT, tools=TOOLS, kwargs={name: True})
    assert text.endswith(
        f"{USER}Hi{ASSISTANT}<think>greet</think>Hello.{EOS}{USER}Warm?{ASSISTANT}<think>"
        f"look it up</think>{CALLED}{EOS}{RESULTS}{ASSISTANT}<think>"
    )


@pytest.mark.parametrize(
    ("effort", "begin"),
    [
        ("low", ""),
        ("high", "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"),
        ("max", "Reasoning Effort: Beyond maximum — exhaustive, relentless"),
    ],
)
def test_effort(template, byte_level, effort, begin):
    kwargs = {"thinking": True, "reasoning_effort": effort}
    text = template.render(byte_level, CHAT[1:2], kwargs=kwargs)
    assert text.startswith(BOS + begin)
    assert text.endswith(f"{USER}Hi{ASSISTANT}<think>")
    assert len(text) > 400 or not begin
    kwargs["thinking"] = False
    assert (
        template.render(byte_level, CHAT[1:2], kwargs=kwargs) == f"{BOS}{USER}Hi{ASSISTANT}</think>"
    )


def test_tools_follow_the_first_system_message(template, byte_level):
    text = template.render(byte_level, CHAT[:2], tools=TOOLS)
    assert text.startswith(f"{BOS}Be brief.\n\n## Tools\n\nYou have access")
    assert text.endswith(
        f"### Available Tool Schemas\n\n{json.dumps(TOOLS[0]['function'])}\n\nYou MUST strictly "
        "follow the above defined tool name and parameter schemas to invoke tool calls.\n"
        f"{USER}Hi{ASSISTANT}</think>"
    )
    assert template.render(byte_level, CHAT[1:2], tools=TOOLS) == text.replace("Be brief.", "")


def test_continuing(template, byte_level):
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = template.render(byte_level, CHAT[1:3], **options)
    assert text == f"{BOS}{USER}Hi{ASSISTANT}</think>Hello."


def test_what_it_rejects(template, byte_level):
    with pytest.raises(InvalidRequest, match="unknown role"):
        template.render(byte_level, [{"role": "critic", "content": ""}])
