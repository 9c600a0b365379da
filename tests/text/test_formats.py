"""Answer formats that are data: what their parsers make of answers, whole and in pieces."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from moeserve.errors import ConfigError
from moeserve.text.answer_data import DataFormat, find_format
from moeserve.text.answer_format import Part
from moeserve.text.answer_syntax import load, names
from moeserve.text.harmony import HARMONY, HarmonyFormat
from moeserve.text.tokenizer import CONTROL_BEGIN, CONTROL_END, Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "where": {"type": "object", "properties": {"hot": {"type": "boolean"}}},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = {"city": 'Zürich "<x>"\n\\ 5', "days": 3, "where": {"hot": True}}
SPECIAL = {  # tokens that are special in models of a format
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
    "harmony": [*HARMONY, "<|constrain|>"],
    "llama3_json": ["<|python_tag|>"],
    "hermes": ["<tool_call>", "</tool_call>"],
}
ALL = sorted([*names(), "harmony"])


def tokenizer_with(special: list[str]) -> Tokenizer:
    """Return a tokenizer of bytes and some special tokens."""
    backend = Backend(
        models.BPE(
            vocab={char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]
        )
    )
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ["<eos>", *special]])
    return Tokenizer(backend, {})


@pytest.fixture(scope="module")
def formats():
    return {name: find_format("", tokenizer_with(SPECIAL.get(name, [])), name) for name in ALL}


def marked(text: str, name: str) -> str:
    """Return a text with its special tokens marked, as the format's tokenizer does."""
    for token in ["<eos>", *SPECIAL.get(name, [])]:
        text = text.replace(token, f"{CONTROL_BEGIN}{token}{CONTROL_END}")
    return text


def write(name: str, calls: list[tuple[str, dict]]) -> str:
    """Return calls as a model of the format writes them."""
    if name == "harmony":
        called, arguments = calls[0]
        return (
            f"<|channel|>commentary to=functions.{called} <|constrain|>json<|message|>"
            f"{json.dumps(arguments)}"
        )
    syntax = load(name).calls
    texts = []
    for i, (called, arguments) in enumerate(calls):
        body = json.dumps(arguments, ensure_ascii=False)
        if syntax.content == "python":
            body = ", ".join(
                f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()
            )
        elif syntax.quote:
            body = "{" + ",".join(f"{key}:{_bare(value)}" for key, value in arguments.items()) + "}"
        elif syntax.parameter:
            body = "".join(
                _tagged(syntax.parameter, key, value) for key, value in arguments.items()
            )
        text = syntax.write.replace("{name}", called).replace("{index}", str(i))
        texts.append(text.replace("{arguments}", body))
    return syntax.before + syntax.between.join(texts) + syntax.after


def _tagged(parameter, key, value):
    is_text = isinstance(value, str)
    template = (is_text and parameter.write_text) or parameter.write
    kind = "string" if is_text else "number" if isinstance(value, int) else "object"
    text = value if is_text else json.dumps(value)
    return template.replace("{key}", key).replace("{type}", kind).replace("{value}", text)


def _bare(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_bare(item)}" for key, item in value.items()) + "}"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def read(answer_format, pieces, tools=TOOLS, **options):
    """Return content, reasoning and calls that the parser reads from pieces."""
    parser = answer_format.parser(tools, **options)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    texts = {"content": "", "reasoning": ""}
    calls = []
    for kind, text, *_ in [*parts, *parser.push("", final=True)]:
        if kind == "call":
            calls.append([text, ""])
        elif kind == "arguments":
            calls[-1][1] += text
        else:
            texts[kind] += text
    return texts["content"], texts["reasoning"], [tuple(call) for call in calls]


@pytest.mark.parametrize("name", ALL)
def test_calls_that_a_model_writes_come_out(formats, name):
    wanted = [("weather", ARGUMENTS), ("now", {})][: 1 if name == "harmony" else 2]
    _, _, calls = read(formats[name], [marked(write(name, wanted), name)])
    assert [(called, json.loads(arguments)) for called, arguments in calls] == wanted


@pytest.mark.parametrize("name", ALL)
def test_calls_of_a_request_without_tools_are_text(formats, name):
    answer = marked(write(name, [("weather", ARGUMENTS)]), name)
    shown = read(formats[name], [answer], (), calls=False)
    assert read(formats[name], answer, (), calls=False) == shown
    content, reasoning, calls = shown
    assert calls == []
    # In gpt-oss's format a message to an unknown recipient is no content.
    assert "city" in (reasoning if name == "harmony" else content)
    if name not in ("harmony", "deepseek_v3"):  # which has a control token within the header
        assert content.strip() == write(name, [("weather", ARGUMENTS)]).strip()


@pytest.mark.parametrize("name", [name for name in names() if load(name).reasoning])
def test_reasoning_is_split_off(formats, name):
    span = load(name).reasoning
    call = write(name, [("now", {})])
    answer = f"{span.open}\nwell \n{span.close}\n\nHello\n{call}"
    wanted = ("Hello", "well", [("now", "{}")])
    assert read(formats[name], list(marked(answer, name))) == wanted
    opened = answer.removeprefix(span.open)
    assert read(formats[name], [marked(opened, name)], prompt=f"...{span.open}\n") == wanted
    closed = f"Hello\n{call}"
    assert read(
        formats[name], [marked(closed, name)], prompt=f"...{span.open}\n\n{span.close}\n\n"
    )[:2] == (
        "Hello",
        "",
    )
    middle = f"...{span.open} so far"
    assert read(
        formats[name], [marked(f"well{span.close}Hi", name)], prompt=middle, continued=True
    )[:2] == (
        "Hi",
        "well",
    )


@pytest.mark.parametrize("name", ALL)
def test_any_split_gives_the_same(formats, name):
    span = None if name == "harmony" else load(name).reasoning
    call = write(name, [("weather", ARGUMENTS)])
    seeds = [
        call,
        f"Hi {call} {call}",
        call[: len(call) * 2 // 3],
        call[5:],
        f"{call[:-9]} x {call}",
    ]
    seeds += [f"{span.open}a {span.close} b {call}"] if span else []
    marks = sorted(
        {
            *call.replace('"', ' " ').split(),
            "<",
            "{",
            "}",
            " ",
            "\\",
            *([span.open, span.close] if span else []),
        }
    )

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(
        st.one_of(
            st.sampled_from(seeds),
            st.lists(st.sampled_from([*marks, "weather", "x"]), max_size=14).map("".join),
        ),
        st.lists(st.integers(0, 400), max_size=12),
    )
    def check(answer: str, cuts: list[int]) -> None:
        text = marked(answer, name)
        whole = read(formats[name], [text])
        edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
        assert read(formats[name], [text[a:b] for a, b in pairwise(edges)]) == whole
        assert read(formats[name], list(text)) == whole
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[2])

    check()


@pytest.mark.parametrize("name", ALL)
def test_plain_text_stays_as_it_is(formats, name):
    for text in ["", "Hello.\n\nA list:\n - a < b, {x} [y] 1\n", '日本語 \\ "q" </x>']:
        answer = f"<|channel|>final<|message|>{text}" if name == "harmony" else text
        assert read(formats[name], list(marked(answer, name))) == (text, "", [])


@pytest.mark.parametrize("name", ALL)
def test_a_call_that_is_cut_off_is_no_call(formats, name):
    call = write(name, [("weather", ARGUMENTS)])
    at = call.index("Z")
    assert read(formats[name], [marked(call[: at + 3], name)])[2] == []


def test_text_that_only_looks_like_a_call_is_content(formats):
    for answer in [
        "<tool_call>nothing</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        "<tool_call>[1]</tool_call> x",
    ]:
        assert read(formats["hermes"], [marked(answer, "hermes")]) == (answer, "", [])
    quoted = marked('The mark "<tool_call>" comes first.', "hermes")
    assert read(formats["hermes"], [quoted]) == ('The mark "<tool_call>" comes first.', "", [])
    typed = "<tool_call>{}</tool_call>"  # not the special token
    assert read(formats["hermes"], [typed]) == (typed, "", [])
    for answer in [
        '{"a": 1} is a dict',
        '{"name": "unknown", "parameters": {}}',
        '{"name": "weather"',
        "[1, 2]",
    ]:
        assert read(formats["llama3_json"], list(answer)) == (answer, "", [])
        got = read(formats["llama3_json"], list('{"name": "now", "parameters": {}}; ' + answer))
        assert got == ("; " + answer, "", [("now", "{}")])
    for answer in ["[weather]", "[unknown()]", "[a, b]", "[weather(1)]"]:
        assert read(formats["pythonic"], list(answer)) == (answer, "", [])


def test_other_special_tokens_are_dropped_from_content_and_kept_in_arguments(formats):
    answer = (
        'a<eos>b<tool_call>{"name": "now", "arguments": {"x": "<eos></tool_call>"}}</tool_call>'
    )
    got = read(formats["hermes"], list(marked(answer, "hermes")))
    assert got == ("ab", "", [("now", '{"x": "<eos></tool_call>"}')])


def test_a_call_comes_when_it_is_complete(formats):
    parser = formats["hermes"].parser(TOOLS)
    assert (
        parser.push(marked('<tool_call>{"name": "weather", "arguments": {"city": "Zür', "hermes"))
        == []
    )


@pytest.mark.parametrize(
    ("name", "answer", "arguments"),
    [
        (
            "qwen3_coder",
            (
                "<tool_call>\n<function=weather>\n<parameter=city>\n5\n</parameter>\n"
                "<parameter=days>\n5\n</parameter>\n</function>\n</tool_call>"
            ),
            {"city": "5", "days": 5},
        ),
        (
            "qwen3_coder",
            (
                "<function=weather>\n<parameter=city>\na\n<parameter=days>\n1\n</parameter>\n"
                "</function>\n</tool_call>"
            ),
            {"city": "a", "days": 1},
        ),
        (
            "qwen3_coder",
            (
                "<function=weather><parameter=city>a </parameter> and </function> b</parameter>"
                "</function>"
            ),
            {"city": "a </parameter> and </function> b"},
        ),
        (
            "glm45",
            (
                "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>soon</arg_value>\n"
                "</tool_call>"
            ),
            {"days": "soon"},
        ),
        (
            "glm47",
            (
                "<tool_call>weather<arg_key>where</arg_key><arg_value>{'hot': True}</arg_value>"
                "</tool_call>"
            ),
            {"where": {"hot": True}},
        ),
        (
            "pythonic",
            "[weather(city='it\\'s \\n', where={'hot': True, 'l': [1, -2.5]})]",
            {"city": "it's \n", "where": {"hot": True, "l": [1, -2.5]}},
        ),
        (
            "mistral_v3",
            '[TOOL_CALLS] [{"arguments": {"city": "x"}, "name": "weather"}]',
            {"city": "x"},
        ),
        (
            "llama3_json",
            '{"type": "function", "name": "weather", "parameters": "{\\"days\\": 1}"}',
            {"days": 1},
        ),
        ("hermes", '<tool_call>{"name": "weather", "arguments": null}</tool_call>', {}),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\d"}}',
            {"city": "a\nb\\d"},
        ),
    ],
)
def test_what_models_write_besides(formats, name, answer, arguments):
    content, _, calls = read(formats[name], list(marked(answer, name)))
    assert (content, [(called, json.loads(text)) for called, text in calls]) == (
        "",
        [("weather", arguments)],
    )


@pytest.mark.parametrize("name", ALL)
def test_hostile_answers_take_linear_time(formats, name):
    call = write(name, [("weather", {"city": "C"})])
    before = call[: call.index("C")]
    units = [before, " ", "{", '"', "\\", "<", call[-12:]]

    def seconds(unit: str, size: int) -> float:
        parser = formats[name].parser(TOOLS)
        pieces = list(marked(before, name) + marked(unit, name) * (size // len(unit)))
        begin = time.thread_time()
        for piece in pieces:
            parser.push(piece)
        parser.push("", final=True)
        return time.thread_time() - begin

    for unit in units:
        ratio = min(seconds(unit, 16_000) for _ in range(2)) / max(
            min(seconds(unit, 2_000) for _ in range(2)), 1e-3
        )
        assert ratio < 30, unit  # 8 times the text; 64 if quadratic


TEMPLATES = {  # what distinguishes the templates of models
    "hermes": (
        '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\\n<function=example>\\n<parameter=p>\\nv\\n</parameter> {{ arguments }}"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ x }}<｜tool▁sep｜>{{ name }}\\n```json\\n"
        "{{ args }}"
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ arguments }}"
    ),
    "deepseek_v32": "<｜DSML｜function_calls>\n<｜DSML｜invoke name=",
    "deepseek_v4": "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"
        "{{ args }}"
    ),
    "glm45": (
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{{ arguments }}"
    ),
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{{ arguments }}",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="tool">\n<parameter name="p">',
    "llama3_json": (
        '{{- "Environment: ipython\\n" }} {"name": function name, "parameters": dictionary}.'
    ),
    "pythonic": (
        "[func_name1(params_name1=params_value1, params_name2=params_value2...), "
        "func_name2(params)]"
    ),
    "mistral": "[TOOL_CALLS]' + name + '[ARGS]' + arguments",
    "mistral_v3": '[TOOL_CALLS] [{"name": ..., "arguments": ...}]',
    "granite": "<|tool_call|>",
    "gemma4": "<|tool_call>call: <|channel>thought",
    None: "{{ message.content }}",
}


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_a_template_shows_its_format(name, template):
    found = find_format(template, tokenizer_with([]))
    assert (found and found.name) == name


def test_formats_by_name():
    assert isinstance(find_format("", tokenizer_with(SPECIAL["harmony"])), HarmonyFormat)
    assert isinstance(find_format("<tool_call>", tokenizer_with([]), "glm45"), DataFormat)
    with pytest.raises(ConfigError, match=r"unknown; one of deepseek_v3, .*harmony, hermes"):
        find_format("", tokenizer_with([]), "gpt")
    with pytest.raises(ConfigError, match="harmony"):
        find_format("", tokenizer_with([]), "harmony")
    assert (
        find_format("", tokenizer_with([]), "kimi_k2").call_id("f", 2, "0" * 32) == "functions.f:2"
    )
    assert len(find_format("", tokenizer_with([]), "mistral").call_id("f", 2, "0" * 32)) == 9
