"""Shapes of conversations that some chat templates refuse or lose, and their conversions.

A `ChatShape` has a probe: a small conversation of this shape, whose texts must be in the prompt.
Where they are not, `convert` makes a conversation of the same texts that the template takes. All
functions return copies. Contents are text; beside calls they may be absent.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from moeserve.text.chat_messages import Message, TemplateInput
from moeserve.text.fit_calls import (
    calls_as_text,
    has_calls,
    has_calls_or_listing,
    has_orphans,
    has_parallel_calls,
    has_results_apart,
    has_text_and_thoughts_beside_calls,
    has_text_before_calls,
    has_text_beside_calls,
    lacks_ids,
    lacks_names,
    lacks_results,
    one_call_at_a_time,
    orphans_as_users,
    results_behind_calls,
    text_as_thought,
    text_before_calls,
    text_before_result,
    text_beside_calls,
    with_ids,
    with_names,
    with_results,
    with_short_ids,
)
from moeserve.text.fit_tools import (
    has_odd_type,
    has_tools,
    lacks_description,
    lacks_parameters,
    lacks_properties,
    lacks_property_description,
    tools_in_system_message,
    with_descriptions,
    with_parameters,
    with_plain_types,
    with_properties,
    with_property_descriptions,
)
from moeserve.text.fit_turns import (
    adjacent_systems_joined,
    assistant_begins,
    assistant_begins_without_user,
    assistants_joined,
    ends_without_user,
    has_adjacent_systems,
    has_empty_answer,
    has_late_system,
    has_neighbors,
    has_system,
    has_user_after_result,
    lacks_user,
    system_in_first_user,
    system_in_last_user,
    systems_joined,
    user_begins,
    user_in_result,
    users_joined,
    without_empty_answers,
)

_PROBE_TEXT = re.compile(r"probe\d+")


class ChatShape(NamedTuple):
    """A shape of conversations, and what becomes of it where a template does not take it."""

    occurs: Callable[[TemplateInput], bool]
    probe: list[Message]
    convert: Callable[[TemplateInput], TemplateInput]
    # A longer conversation, which must be taken after the conversion
    later: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None  # of the probe, instead of usual ones


def probe_texts(probe: Any) -> list[str]:
    """Return the texts of a probe that must be in its prompt."""
    return _PROBE_TEXT.findall(json.dumps(probe))


def _user(number: int) -> Message:
    return {"role": "user", "content": f"probe{number}"}


def _system(number: int) -> Message:
    return {"role": "system", "content": f"probe{number}"}


def _assistant(number: int) -> Message:
    return {"role": "assistant", "content": f"probe{number}"}


def _call(number: int, **fields: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": {"a": f"probe{number}"}}
    return {"id": f"call0000{number}", "type": "function", "function": function} | fields


def _calls(*made: dict[str, Any], **fields: Any) -> Message:
    return {"role": "assistant", "tool_calls": list(made)} | fields


def _result(number: int, call: int, **fields: Any) -> Message:
    fields = {"tool_call_id": f"call0000{call}"} | fields
    return {"role": "tool", "content": f"probe{number}"} | fields


def _tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "probe90"} | fields}


def _schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties][:1]}


_SCHEMA = _schema(a={"type": "string", "description": "text"})
PROBE_TOOLS = [_tool(description="a tool", parameters=_SCHEMA)]
# Arguments whose type is not one name
_ODD_PROPERTIES: dict[str, Any] = {
    "probe92": {"type": ["string", "null"], "description": "a"},
    "probe93": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "a"},
    "probe94": {"$ref": "#/$defs/Item", "description": "a"},
    "probe95": {"type": "object", "description": "a"},
    "probe96": {"type": "array", "description": "a"},
    "probe97": {"enum": ["a"], "description": "a"},
}
STEP = [_user(1), _calls(_call(2)), _result(3, call=2), _assistant(4), _user(5)]


# ---- All shapes, in the order in which they are converted. The probes of a shape go through the
# conversions before it.

TOOL_SHAPES = (
    ChatShape(
        occurs=lambda chat: chat.tools is None,
        probe=[_user(1)],
        convert=lambda chat: chat._replace(tools=[]),
    ),
    ChatShape(
        occurs=lacks_description,
        probe=[_user(1)],
        tools=[_tool(parameters=_SCHEMA)],
        convert=with_descriptions,
    ),
    ChatShape(
        occurs=lacks_parameters,
        probe=[_user(1)],
        tools=[_tool(description="probe91")],
        convert=with_parameters,
    ),
    ChatShape(
        occurs=lacks_properties,
        probe=[_user(1)],
        tools=[_tool(description="probe91", parameters={"type": "object"})],
        convert=with_properties,
    ),
    ChatShape(
        occurs=lacks_property_description,
        probe=[_user(1)],
        tools=[_tool(description="probe91", parameters=_schema(probe92={"type": "string"}))],
        convert=with_property_descriptions,
    ),
    ChatShape(
        occurs=has_odd_type,
        probe=[_user(1)],
        tools=[_tool(description="probe91", parameters=_schema(**_ODD_PROPERTIES))],
        convert=with_plain_types,
    ),
    ChatShape(
        occurs=has_tools,
        probe=[_user(1)],
        tools=PROBE_TOOLS,
        convert=tools_in_system_message,
    ),
    ChatShape(
        occurs=has_tools,
        probe=[_user(1)],
        tools=PROBE_TOOLS,
        convert=lambda chat: system_in_first_user(tools_in_system_message(chat)),
    ),
)
SHAPES = (
    ChatShape(occurs=has_system, probe=[_system(1), _user(2)], convert=system_in_first_user),
    ChatShape(
        occurs=has_adjacent_systems,
        probe=[_system(1), _system(2), _user(3)],
        convert=adjacent_systems_joined,
    ),
    ChatShape(
        occurs=has_late_system,
        probe=[_system(1), _user(2), _system(3), _assistant(4), _user(5)],
        convert=systems_joined,
    ),
    ChatShape(
        occurs=lacks_user,
        probe=[_system(1)],
        convert=system_in_first_user,
    ),
    ChatShape(
        occurs=ends_without_user,
        probe=[_system(1), _user(2), _assistant(3)],
        convert=system_in_last_user,
    ),
    ChatShape(
        occurs=has_empty_answer,
        probe=[_user(1), {"role": "assistant", "content": ""}],
        convert=without_empty_answers,
    ),
    ChatShape(
        occurs=has_neighbors("user"),
        probe=[_user(1), _user(2)],
        convert=users_joined,
    ),
    ChatShape(
        occurs=has_neighbors("assistant"),
        probe=[_user(1), _assistant(2), _assistant(3), _user(4)],
        convert=assistants_joined,
    ),
    # Results in the probes of the shapes behind this one get names where they need them.
    ChatShape(occurs=lacks_names, probe=STEP, convert=with_names),
    ChatShape(occurs=assistant_begins, probe=[_assistant(1), _user(2)], convert=user_begins),
    ChatShape(
        occurs=assistant_begins,
        probe=[_calls(_call(1)), _result(2, call=1), _user(3)],
        convert=user_begins,
    ),
    ChatShape(
        occurs=assistant_begins_without_user,
        probe=[_calls(_call(1)), _result(2, call=1)],
        convert=user_begins,
    ),
    ChatShape(
        occurs=has_calls_or_listing,
        # A name, because some templates show only the arguments that they know.
        probe=[
            _user(1),
            _calls(_call(9, function={"name": "probe2", "arguments": {"a": "b"}})),
            _result(3, call=9),
            _assistant(4),
            _user(5),
        ],
        convert=calls_as_text,
    ),
    ChatShape(
        occurs=lacks_ids,
        probe=[
            _user(1),
            _calls({"type": "function", "function": _call(2)["function"]}),
            {"role": "tool", "content": "probe3"},
        ],
        convert=with_ids,
    ),
    ChatShape(
        occurs=has_calls,
        probe=[
            _user(1),
            _calls(_call(2, id="call_of_any_length")),
            _result(3, call=2, tool_call_id="call_of_any_length"),
        ],
        convert=with_short_ids,
    ),
    ChatShape(
        occurs=has_user_after_result,
        probe=[_user(1), _calls(_call(2)), _result(3, call=2), _user(4)],
        convert=user_in_result,
    ),
    ChatShape(
        occurs=has_results_apart,
        probe=[_user(1), _calls(_call(2)), _user(3), _result(4, call=2)],
        convert=results_behind_calls,
    ),
    ChatShape(
        occurs=has_orphans,
        probe=[_user(1), _assistant(2), _user(3), _result(4, call=9)],
        convert=orphans_as_users,
    ),
    ChatShape(
        occurs=lacks_results,
        probe=[_user(1), _calls(_call(2)), _user(3)],
        convert=with_results,
    ),
    ChatShape(
        occurs=has_parallel_calls,
        probe=[_user(1), _calls(_call(2), _call(3)), _result(4, call=2), _result(5, call=3)],
        convert=one_call_at_a_time,
    ),
    ChatShape(
        occurs=has_text_and_thoughts_beside_calls,
        probe=[
            _user(1),
            _calls(_call(2), content="probe3", thinking="a", reasoning_content="a"),
            _result(4, call=2),
        ],
        convert=text_as_thought,
    ),
    ChatShape(
        occurs=has_text_beside_calls,
        probe=[_user(1), _calls(_call(2), content="probe3"), _result(4, call=2)],
        later=[
            _user(1),
            _calls(_call(2), content="probe3"),
            _result(4, call=2),
            _assistant(5),
            _user(6),
        ],
        convert=text_before_calls,
    ),
    ChatShape(
        occurs=has_text_beside_calls,
        probe=[_user(1), _calls(_call(2), content="probe3"), _result(4, call=2)],
        convert=text_before_result,
    ),
    ChatShape(
        occurs=has_text_before_calls,
        probe=[
            _user(1),
            _assistant(2),
            _calls(_call(3)),
            _result(4, call=3),
            _assistant(5),
            _user(6),
        ],
        convert=text_beside_calls,
    ),
)
