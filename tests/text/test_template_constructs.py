"""Every construct that published chat templates use renders as transformers renders it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from jinja2.exceptions import TemplateError

from moeserve.errors import CheckpointError, InvalidRequest
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.tokenizer import unshield

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wie ist das Wetter? <|im_end|> & <b>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Köln", "Ω"]},
                    "days": {"type": ["integer", "null"]},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object"}},
    },
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}},
}
CHAT = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " Wie war's?\n  漢字 \x7f 😀 "},
    {"role": "assistant", "content": "", "reasoning": "look it up", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 21}', "tool_call_id": "c1", "name": None},
    {"role": "assistant", "content": "<think>\nok\n</think>\n\n21 degrees."},
    {"role": "user", "content": "Thanks <|im_end|>"},
]
CONSTRUCTS = dict(
    section.split("\n", 1)
    for section in Path(__file__).with_name("constructs.jinja").read_text().split("### ")[1:]
)


@pytest.fixture(scope="session")
def theirs(byte_level_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(byte_level_dir)


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_constructs_render_as_in_transformers(byte_level, theirs, name):
    source = CONSTRUCTS[name]
    kwargs = {"enable_thinking": False, "reasoning_effort": "high"}
    for messages, tools in ((CHAT, TOOLS), (CHAT[:2], None)):
        if "messages[0].content" in source or "|first" in source:
            messages = CHAT[1:2]  # where only the first is shown, others would be joined to it
        ours = ChatTemplate(source)
        # Without a place for them, tools would become text of the system message.
        options = {"add_generation_prompt": True, "tools": tools if "tools" in source else None}
        try:
            expected = theirs.apply_chat_template(
                messages, chat_template=source, tokenize=False, **options, **kwargs
            )
        except TemplateError as error:
            with pytest.raises(InvalidRequest, match=f"rejects these messages: {error}"):
                ours.render(byte_level, messages, kwargs=kwargs, **options)
        else:
            assert unshield(ours.render(byte_level, messages, kwargs=kwargs, **options)) == expected


def test_control_tokens_in_tools_and_calls_are_plain_text(byte_level):
    source = (
        "<|im_start|>{{ tools|tojson(ensure_ascii=true) }}{{ messages[0].tool_calls|tojson }}"
        "<|im_end|>"
    )
    call = {
        "function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_start|>", {"a": "<think>"}]}}
    }
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    ids = ChatTemplate(source).encode(byte_level, [message], tools=TOOLS)
    control = set(byte_level.backend.get_added_tokens_decoder())
    assert [i for i in ids if i in control] == [
        byte_level.backend.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>")
    ]
    text = byte_level.decode(ids, skip_special_tokens=False)
    assert json.dumps(TOOLS) in text
    assert json.dumps([call]) in text


@pytest.mark.parametrize("content", ["Once upon ", " a", "a\n"])
@pytest.mark.parametrize(
    "source", ["{{ messages[-1].content }}</s>\n", "{{ messages[-1].content|trim }}</s>"]
)
def test_continuing_equals_transformers(byte_level, theirs, source, content):
    chat = [*CHAT[:2], {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=False, **options)
    assert ChatTemplate(source).render(byte_level, chat, **options) == expected


def test_the_template_for_tools_is_used_with_tools(tmp_path, byte_level):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    for _ in range(2):
        template = ChatTemplate.load(tmp_path)
        assert template.render(byte_level, CHAT) == "plain"
        assert template.render(byte_level, CHAT, tools=TOOLS) == "tools"
        (tmp_path / "chat_template.jinja").write_text("plain")  # the second time: files
        (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ ''.__class__ }}")
    with pytest.raises(CheckpointError, match="rejected"):
        ChatTemplate.load(tmp_path)


def test_a_processors_template_file(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "one"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "two"}))
    assert ChatTemplate.load(tmp_path).source == "one"


@pytest.mark.parametrize(
    "source",
    ["{% set n = namespace(__class__=1) %}", "{% set n = namespace() %}{% set n._x = 1 %}"],
)
def test_namespaces_have_no_private_names(source):
    with pytest.raises(CheckpointError, match="namespace cannot have"):
        ChatTemplate(source)


def test_mistral_common_makes_the_template_of_a_tekken_file(tmp_path, monkeypatch):
    (tmp_path / "tekken.json").write_text("{}")
    name = "mistral_common.integrations.chat_templates.chat_templates"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        CheckpointError, match=r"pip install 'moeserve\[mistral\]'.*--chat-template"
    ):
        ChatTemplate.load(tmp_path)
    (tmp_path / "mine").write_text("mine")
    assert ChatTemplate.load(tmp_path, tmp_path / "mine").source == "mine"
    module = ModuleType(name)
    for parent in (
        "mistral_common",
        "mistral_common.integrations",
        "mistral_common.integrations.chat_templates",
    ):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    module.convert_tokenizer_to_chat_template = lambda path: f"made for {path.name}"
    assert ChatTemplate.load(tmp_path).source == "made for tekken.json"
    module.convert_tokenizer_to_chat_template = lambda path: 1 / 0
    with pytest.raises(CheckpointError, match="makes no chat template"):
        ChatTemplate.load(tmp_path)
