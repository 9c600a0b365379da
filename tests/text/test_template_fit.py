"""Conversations of every kind reach the model through templates that do not take them as they are.

Each template below does one thing that published ones do.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from moeserve.errors import InvalidRequest
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.fit_turns import START
from moeserve.text.sandbox_pool import SandboxPool
from tools.agent_histories import HISTORIES
from tools.render_templates import TemplateCheck, missing, plain_tokenizer

TOOLS = "{% if tools %}{{ tools|tojson }}{% endif %}"
CONTENT = "{{ m.content }}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments|tojson }}{% endfor %}"
)
END = "{% if add_generation_prompt %}<assistant>{% endif %}"


def template(
    before: str = "", tools: str = TOOLS, content: str = CONTENT, calls: str = CALLS
) -> str:
    turns = "{% for m in messages %}<{{ m.role }}>" + content + calls + "<end>{% endfor %}"
    return tools + before + turns + END


def refusing(condition: str) -> str:
    """Return a template that raises for a message `m` with a condition."""
    return template(
        "{% for m in messages %}{% if " + condition + " %}{{ raise_exception('refused') }}"
        "{% endif %}{% endfor %}"
    )


ALTERNATES = (
    "{% set n = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role != 'tool' and not m.tool_calls and not (loop.first and m.role == 'system') %}"
    "{% if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
    "{% set n.i = n.i + 1 %}{% endif %}{% endfor %}"
)
PLAIN = template()
TEMPLATES = {
    "plain": PLAIN,
    "fails with null": template(content="{{ m.content + '' }}"),
    "shows calls only with null": template(
        content="",
        calls="{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    ),
    "arguments are text": template(
        calls="{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.arguments }}{% endfor %}"
    ),
    "no system": refusing("m.role == 'system'"),
    "one system": refusing("m.role == 'system' and not loop.first"),
    "last system only": template(
        content="{% if m.role != 'system' or loop.last or messages[loop.index].role != 'system' %}"
        "{{ m.content }}{% endif %}"
    ),
    "alternates": template(ALTERNATES),
    "alternates, and shows text or calls": template(
        ALTERNATES, content="{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    ),
    "alternates, without tools": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles') }}{% endif %}<{{ m.role }}>{{ m.content|trim }}<end>"
        "{% endfor %}" + END
    ),
    "without tools": template(tools="", calls="") + "{# no #}",
    "calls without tools": template(tools=""),
    "tools are never none": template(tools="{% for t in tools %}{{ t|tojson }}{% endfor %}"),
    "tools are described": template(
        tools="{% for t in tools or [] %}{{ t.function.name + t.function.description }}"
        "{% for name, p in t.function.parameters.properties.items() %}"
        "{{ name + p.type + p.description }}{% endfor %}{% endfor %}"
    ),
    "functions": template(tools="{{ functions + datetime }}"),
    "a filter's result as JSON": template(
        tools="{% if tools %}{{ tools|map(attribute='function')|tojson(indent=1) }}{% endif %}"
    ),
    "one call": refusing("m.tool_calls and m.tool_calls|length > 1"),
    "the first call": template(
        calls=CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    ),
    "text or calls": template(content="{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
    "text or thoughts": template(
        content="{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('refused') }}{% endif %}{{ m.thinking }}{{ m.content }}"
    ),
    "short ids": refusing(
        "m.tool_call_id is defined and m.tool_call_id|length != 9"
        " or m.tool_calls and m.tool_calls[0].id|length != 9"
    ),
    "ids": template(calls=CALLS.replace("<call>", "{{ '<call>' + c.id }}")),
    "results have names": refusing("m.role == 'tool' and not m.name"),
    "shows names, and needs them": template(
        content="{% if m.role == 'tool' %}{{ m.name + ': ' }}{% endif %}{{ m.content }}"
    ),
    "results follow calls": refusing(
        "m.role == 'tool' and (loop.first or messages[loop.index0 - 1].role != 'tool'"
        " and not messages[loop.index0 - 1].tool_calls)"
    ),
    "results follow calls, or are lost": template(
        content="{% if m.role != 'tool' or messages[loop.index0 - 1].tool_calls"
        " or messages[loop.index0 - 1].role == 'tool' %}{{ m.content }}{% endif %}"
    ),
    "system in the last turn": template(
        content="{% if m.role != 'system' %}{% if loop.last and m.role == 'user'"
        " and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{{ m.content }}{% endif %}"
    ),
    "needs a user": template(
        "{% if not messages|selectattr('role', 'equalto', 'user')|list %}"
        "{{ raise_exception('no user') }}{% endif %}"
    ),
    "no empty answers": refusing("m.role == 'assistant' and not m.content and not m.tool_calls"),
    "collects": template(
        "{% set kept = ['x'] %}{% for m in messages %}{% set _ = kept.append(m.role) %}{% endfor %}"
        "{% set _ = kept.pop(0) %}"
        "{{ kept[0] }}"
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return plain_tokenizer()


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_history_reaches_the_model(name, tokenizer):
    check = TemplateCheck(name, ChatTemplate(TEMPLATES[name]), tokenizer)
    faults = [fault for history in HISTORIES for fault in check.faults(history)]
    assert not faults


def test_the_check_finds_what_is_lost(tokenizer):
    check = TemplateCheck("", ChatTemplate("{{ messages[-1].role }} None"), tokenizer)
    history = HISTORIES[1]
    (fault,) = check.faults(history)
    assert fault.kind == "lost"
    assert fault.detail.split() == missing(history, "") != []
    shows_none = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{{ nothing|default(none) }}{% endfor %}"
    )
    (fault,) = TemplateCheck("", shows_none, tokenizer).faults(history)
    assert fault.kind == "nobody's word"


USER = {"role": "user", "content": "ask"}
SYSTEM = {"role": "system", "content": "rules"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "done"}
OTHER_RESULT = {"role": "tool", "tool_call_id": "c2", "content": "gone"}
ANSWER = {"role": "assistant", "content": "It is."}


def calling(*calls, **fields):
    return {"role": "assistant", "tool_calls": list(calls)} | fields


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("no system", [SYSTEM, USER], "<user>rules\n\nask<end>"),
        ("needs a user", [SYSTEM], "<user>rules<end>"),
        ("alternates", [USER, USER], "<user>ask\n\nask<end>"),
        (
            "alternates",
            [{"role": "assistant", "content": "hello"}, USER],
            f"<user>{START}<end><assistant>hello<end><user>ask<end>",
        ),
        (
            "alternates",
            [USER, calling(CALL), RESULT, USER],
            '<user>ask<end><assistant><call>f{"a": 1}<end><tool>done\n\nask<end>',
        ),
        (
            "one call",
            [USER, calling(CALL, OTHER), RESULT | {"tool_call_id": "c2"}, RESULT],
            '<user>ask<end><assistant><call>f{"a": 1}<end><tool>done<end>'
            "<assistant><call>g{}<end><tool>done<end>",
        ),
        (
            "text or calls",
            [USER, calling(CALL, content="I look.")],
            '<user>ask<end><assistant>I look.<end><assistant><call>f{"a": 1}<end>',
        ),
        (
            "results follow calls",
            [USER, RESULT],
            "<user>ask<end><user>done<end>",
        ),
        (
            "alternates, without tools",
            [USER, calling(CALL), RESULT],
            '<user>ask<end><assistant><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n'
            "</tool_call><end><user><tool_response>\ndone\n</tool_response><end>",
        ),
        (
            "no system",
            [SYSTEM, {"role": "assistant", "content": "hello"}, USER],
            "<user>rules<end><assistant>hello<end><user>ask<end>",
        ),
        (
            "needs a user",
            [SYSTEM, calling(CALL), RESULT],
            f'<system>rules<end><user>{START}<end><assistant><call>f{{"a": 1}}<end><tool>done<end>',
        ),
        (
            "alternates",
            [USER, {"role": "assistant", "content": "I look."}, calling(CALL), RESULT, ANSWER],
            '<user>ask<end><assistant>I look.<call>f{"a": 1}<end><tool>done<end>'
            "<assistant>It is.<end>",
        ),
        (
            "alternates, and shows text or calls",
            [
                USER,
                {"role": "assistant", "content": "I look."},
                calling(CALL, content="Wait."),
                RESULT,
                ANSWER,
            ],
            '<user>ask<end><assistant><call>f{"a": 1}<end>'
            "<tool>I look.\n\nWait.\n\ndone<end><assistant>It is.<end>",
        ),
        (
            "shows names, and needs them",
            [USER, calling(CALL), RESULT, calling(OTHER | {"id": "c1"}), RESULT],
            '<user>ask<end><assistant><call>f{"a": 1}<end><tool>f: done<end>'
            "<assistant><call>g{}<end><tool>g: done<end>",
        ),
        (
            "one call",
            [USER, calling(CALL, OTHER), RESULT, calling(CALL, OTHER), RESULT, OTHER_RESULT],
            '<user>ask<end><assistant><call>f{"a": 1}<end><tool>done<end><assistant><call>g{}<end>'
            '<assistant><call>f{"a": 1}<end><tool>done<end><assistant><call>g{}<end>'
            "<tool>gone<end>",
        ),
    ],
)
def test_conversions(name, messages, expected, tokenizer):
    chat = ChatTemplate(TEMPLATES[name])
    assert chat.render(tokenizer, messages, add_generation_prompt=False) == expected
    # Python callers' messages are not changed.
    assert chat.render(tokenizer, messages, add_generation_prompt=False) == expected


def test_ids_are_shortened_equally_each_time(tokenizer):
    chat = ChatTemplate(
        TEMPLATES["short ids"].replace(
            "<end>", "{{ m.tool_call_id }}{{ m.tool_calls[0].id if m.tool_calls }}<end>"
        )
    )
    long_id = "call_" + "0" * 99
    messages = [
        USER,
        calling(CALL | {"id": long_id}),
        RESULT | {"tool_call_id": long_id},
        calling(OTHER | {"id": "abcdefghi"}),
    ]
    prompt = chat.render(tokenizer, messages)
    short_id = prompt.partition('{"a": 1}')[2][:9]
    assert prompt.count(short_id) == 2
    assert "abcdefghi" in prompt
    assert prompt.startswith(chat.render(tokenizer, messages[:3], add_generation_prompt=False))


GROWING = [
    SYSTEM,
    USER,
    calling(CALL, OTHER, content="I look."),
    RESULT,
    RESULT | {"tool_call_id": "c2"},
    calling(CALL | {"id": "c3"}),
    RESULT | {"tool_call_id": "c3"},
    {"role": "assistant", "content": "It is."},
    USER,
]
# These templates move the system message themselves.
MOVING = "system in the last turn"


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != MOVING])
def test_a_longer_conversation_begins_with_a_shorter_one(name, tokenizer):
    chat = ChatTemplate(TEMPLATES[name])
    prompts = [
        chat.render(tokenizer, GROWING[:length], tools=[], add_generation_prompt=False)
        for length in (2, 5, 7, 9)
    ]
    for shorter, longer in pairwise(prompts):
        assert longer.startswith(shorter)


def test_tools_are_text_where_the_template_has_none(tokenizer):
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}]
    prompt = ChatTemplate(TEMPLATES["without tools"]).render(tokenizer, [SYSTEM, USER], tools=tools)
    system, _, rest = prompt.partition("<end>")
    assert system.startswith("<system>rules\n\n# Tools")
    assert '{"name": "f", "description": "d"}' in system
    assert "<tool_call>" in system
    assert rest == "<user>ask<end><assistant>"
    # This one shows calls in its own form.
    prompt = ChatTemplate(TEMPLATES["calls without tools"]).render(tokenizer, [USER], tools=tools)
    assert '{"name": "f", "description": "d"}' in prompt
    assert "<tool_call>" not in prompt


def test_a_template_that_ends_its_sandbox_ends_the_request(tokenizer):
    pool = SandboxPool("moeserve.text.template_sandbox", "0.3", purpose="chat templates", size=1)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    chat = ChatTemplate("{% if messages|length > 1 %}" + endless + "{% endif %}", sandboxes=pool)
    with pytest.raises(InvalidRequest, match="exceeds its limits: it took too long"):
        chat.render(tokenizer, [SYSTEM, calling(CALL), RESULT, USER, USER])
    pool.close()
