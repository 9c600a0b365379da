"""Every construct that published chat templates use renders as transformers renders it."""

from __future__ import annotations

import json
import sys
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
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}}
CHAT = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " Wie war's?\n  漢字 \x7f 😀 "},
    {"role": "assistant", "content": "", "reasoning": "look it up", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 21}', "tool_call_id": "c1", "name": None},
    {"role": "assistant", "content": "<think>\nok\n</think>\n\n21 degrees."},
    {"role": "user", "content": "Thanks <|im_end|>"},
]
EACH = "{%- for m in messages -%}"
# fmt: off
CONSTRUCTS = {
    "tojson": "{{ tools|tojson }}{{ messages[1]|tojson }}",
    "tojson options": "{{ tools|tojson(indent=2) }}{{ tools|tojson(4, ) if false }}{{ tools|tojson(separators=(',', ':')) }}"
                      "{{ messages|tojson(ensure_ascii=True, sort_keys=true) }}{{ '\u00e9'|tojson(true, 2) }}",
    "strftime": "{{ strftime_now('%Y-%m-%d') }}{% if strftime_now is defined %}{% set d = strftime_now('%d %b') %}{{ d }}{% endif %}",
    "raise": "{% if messages|length > 3 %}{{ raise_exception('too many: ' ~ messages|length) }}{% endif %}",
    "loop controls": EACH + "{% if m.role == 'tool' %}{% break %}{% elif loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "loop fields": EACH + "{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.length }}{{ loop.first }}{{ loop.last }}"
                   "{{ loop.previtem.role if loop.previtem is defined }}{{ loop.nextitem.role if not loop.last }}"
                   "{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{% else %}none{% endfor %}",
    "loop filter": "{% for m in messages if m['role'] != 'tool' %}{{ loop.index }}{{ m.role }}{% endfor %}"
                   "{% for a, b in [(1, 2), (3, 4)] recursive %}{{ a }}{{ b }}{{ loop.depth }}{% endfor %}",
    "generation": EACH + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(last=0, calls=[]) %}" + EACH + "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
                 "{% set ns.calls = ns.calls + m.get('tool_calls', []) %}{% endfor %}{{ ns.last }}{{ ns.calls|length }}",
    "macros": "{% macro show(text, wrap='<') -%}{{ wrap }}{{ text|trim }}{{ varargs }}{{ caller() if caller }}{%- endmacro %}"
              "{{ show(messages[0].content) }}{{ show('a', '[', 1, 2) }}{% call show('b') %}inner{% endcall %}",
    "sets": "{% set a, b = 1, 2 %}{% set text %}x{{ a }}\n  y{% endset %}{{ text|length }}{{ b }}{% with c = 3 %}{{ c }}{% endwith %}"
            "{% filter upper %}abc{{ a }}{% endfilter %}{% raw %}{{ no }}{% endraw %}{# comment #}",
    "tools": "{% if tools %}{% for t in tools %}{% set f = t.function if t.function is defined else t %}{{ f.name }}({% for n, p in "
             "f.parameters.get('properties', {}).items() %}{{ n }}{{ '' if n in f.parameters.required else '?' }}: {{ p.type if p.type is string "
             "else p.type|join(' | ') }}{{ ' ' ~ p.enum if p.enum is defined }}{{ ', ' if not loop.last }}{% endfor %}){% endfor %}{% endif %}",
    "tool calls": EACH + "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments|tojson }}"
                  "{% for k, v in c.function.arguments|items %}<{{ k }}>{{ v if v is string else v|tojson }}{% endfor %}{% endfor %}{% endfor %}",
    "reasoning": EACH + "{{ m.reasoning_content if m.reasoning_content is defined }}{{ m.thinking }}{{ m.reasoning }}{% endfor %}",
    "no none": EACH + "{{ 'name' in m }}{{ m.tool_call_id }}{{ m.content is none }}{% endfor %}",
    "tests": "{{ [messages is sequence, messages[0] is mapping, messages is iterable, 1 is number, true is boolean, none is none, 'a' is string, "
             "x is undefined, 4 is divisibleby 2, 'A' is upper, 1 is sameas 1, 1 is true, 3 in [1, 3], 'b' not in 'abc', 2 is odd, 1 == 1.0] }}",
    "text": "{% set c = '<think>\nok\n</think>\n\n21 degrees.' %}{{ c.split('</think>')[-1].lstrip('\n') }}|{{ c.split('<think>', 1)[1].rstrip() }}|"
            "{{ c.startswith('<think>') and not c.endswith('x') }}{{ c.replace('\n', '\\n') }}{{ c|replace('ok', 'OK', 1) }}{{ c[2:-3] }}{{ c[::-1] }}"
            "{{ c.strip().upper().find('OK') }}{{ c.count('\n') }}{{ ' '.join(['a', 'b']) }}{{ c.partition('ok')[2] }}{{ c.splitlines() }}",
    "filters": "{{ messages|map(attribute='role')|unique|join(',') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
               "{{ messages|rejectattr('tool_calls', 'defined')|map(attribute='content')|first }}{{ {'b': 1, 'a': 2}|dictsort }}{{ [3, 1]|sort|last }}"
               "{{ 'a\nb'|indent(2, true) }}{{ x|default('d') }}{{ '7'|int + 1 }}{{ 1.26|round(1) }}{{ ['a', '']|select|list }}{{ messages|count }}"
               "{{ 'é'|escape|upper }}{{ [1, 2]|sum }}{{ -3|abs }}{{ 'aB'|capitalize ~ 'a b'|title ~ 'X'|lower }}{{ [1, 2]|reverse|list }}{{ 5|string|float }}",
    "arithmetic": "{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 * 'ab' }}{{ 1 + 2.5 }}{{ 7 / 2 }}{{ -1 }}{{ 'a' 'b' ~ 1 ~ none }}{{ range(2, 9, 3)|list }}{{ 1 if 2 > 1 else 0 }}",
    "dictionaries": "{% set d = dict(a=1, b=[2]) %}{{ d.keys()|list }}{{ d.values()|list }}{{ d.get('z', 5) }}{{ d['b'][0] }}{{ d.items()|list }}{{ messages[-1]['role'] }}",
    "joiners": "{% set comma = joiner(', ') %}{% for i in range(3) %}{{ comma() }}{{ i }}{% endfor %}{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}",
    "white space": "  {% if true %}\n    a {{- ' b ' -}} c\n  {%- endif %}\n\n  {% if false %}\n x\n {% endif %}\n d\n",
    "variables": "{{ bos_token is defined }}{{ eos_token }}{{ add_generation_prompt }}{{ enable_thinking is defined and enable_thinking is false }}"
                 "{{ reasoning_effort|default('medium') }}{{ documents is none }}{{ builtin_tools is defined }}",
}
# fmt: on


@pytest.fixture(scope="session")
def theirs(byte_level_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(byte_level_dir)


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_constructs_render_as_in_transformers(byte_level, theirs, name):
    source, kwargs = CONSTRUCTS[name], {"enable_thinking": False, "reasoning_effort": "high"}
    for messages, tools in ((CHAT, TOOLS), (CHAT[:2], None)):
        ours, options = ChatTemplate(source), {"add_generation_prompt": True, "tools": tools}
        try:
            expected = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options, **kwargs)
        except TemplateError as error:
            with pytest.raises(InvalidRequest, match=f"rejects these messages: {error}"):
                ours.render(byte_level, messages, kwargs=kwargs, **options)
        else:
            assert unshield(ours.render(byte_level, messages, kwargs=kwargs, **options)) == expected


def test_control_tokens_in_tools_and_calls_are_plain_text(byte_level):
    source = "<|im_start|>{{ tools|tojson(ensure_ascii=true) }}{{ messages[0].tool_calls|tojson }}<|im_end|>"
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_start|>", {"a": "<think>"}]}}}
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
@pytest.mark.parametrize("source", ["{{ messages[-1].content }}</s>\n", "{{ messages[-1].content|trim }}</s>"])
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
    with pytest.raises(CheckpointError, match="refused"):
        ChatTemplate.load(tmp_path)


def test_a_processors_template_file(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "one"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "two"}))
    assert ChatTemplate.load(tmp_path).source == "one"


@pytest.mark.parametrize(
    "source", ["{% set n = namespace(__class__=1) %}", "{% set n = namespace() %}{% set n._x = 1 %}"]
)
def test_namespaces_have_no_private_names(source):
    with pytest.raises(CheckpointError, match="namespace cannot have"):
        ChatTemplate(source)


def test_mistral_common_makes_the_template_of_a_tekken_file(tmp_path, monkeypatch):
    (tmp_path / "tekken.json").write_text("{}")
    name = "mistral_common.integrations.chat_templates.chat_templates"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CheckpointError, match=r"pip install 'moeserve\[mistral\]'.*--chat-template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "mine").write_text("mine")
    assert ChatTemplate.load(tmp_path, tmp_path / "mine").source == "mine"
    module = ModuleType(name)
    for parent in ("mistral_common", "mistral_common.integrations", "mistral_common.integrations.chat_templates"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    module.convert_tokenizer_to_chat_template = lambda path: f"made for {path.name}"
    assert ChatTemplate.load(tmp_path).source == "made for tekken.json"
    module.convert_tokenizer_to_chat_template = lambda path: 1 / 0
    with pytest.raises(CheckpointError, match="makes no chat template"):
        ChatTemplate.load(tmp_path)
