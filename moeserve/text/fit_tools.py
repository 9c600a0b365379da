"""Conversions of the definitions of tools, for templates that do not take all of them."""

from collections.abc import Callable
from typing import Any

from moeserve.text.chat_messages import TemplateInput, as_json, joined

_PLAIN_TYPES = ("string", "integer", "number", "boolean", "array", "object")
Schema = dict[str, Any]


def lacks_description(chat: TemplateInput) -> bool:
    return any(not function.get("description") for function in _functions(chat))


def with_descriptions(chat: TemplateInput) -> TemplateInput:
    return _with_each_function(
        chat, lambda function: function | {"description": function.get("description") or ""}
    )


def lacks_parameters(chat: TemplateInput) -> bool:
    return any(not function.get("parameters") for function in _functions(chat))


def with_parameters(chat: TemplateInput) -> TemplateInput:
    none = {"type": "object", "properties": {}}
    return _with_each_function(
        chat, lambda function: function | {"parameters": function.get("parameters") or none}
    )


def lacks_properties(chat: TemplateInput) -> bool:
    return any("properties" not in _parameters(function) for function in _functions(chat))


def with_properties(chat: TemplateInput) -> TemplateInput:
    return _with_each_function(
        chat, lambda function: function | {"parameters": {"properties": {}} | _parameters(function)}
    )


def lacks_property_description(chat: TemplateInput) -> bool:
    return any("description" not in schema for schema in _all_properties(chat))


def with_property_descriptions(chat: TemplateInput) -> TemplateInput:
    return _with_each_property(chat, lambda schema: {"description": ""} | schema)


def has_odd_type(chat: TemplateInput) -> bool:
    return any(schema != _with_plain_type(schema) for schema in _all_properties(chat))


def with_plain_types(chat: TemplateInput) -> TemplateInput:
    return _with_each_property(chat, _with_plain_type)


def has_tools(chat: TemplateInput) -> bool:
    return bool(chat.tools)


def tools_in_system_message(chat: TemplateInput) -> TemplateInput:
    """Write the tools into the system message, for a template that does not render them."""
    lines = "\n".join(as_json(tool.get("function", tool)) for tool in chat.tools or ())
    listing = f"# Tools\n\nYou can call these functions:\n<tools>\n{lines}\n</tools>"
    message = {"role": "system", "content": listing}
    rest = chat.messages
    if rest and rest[0]["role"] == "system":
        message = joined(rest[0], message)
        rest = rest[1:]
    return TemplateInput([message, *rest], None, listing)


def _functions(chat: TemplateInput) -> list[Schema]:
    """Return the functions of the tools. Python callers may give tools of another form."""
    functions = [tool.get("function") for tool in chat.tools or ()]
    return [function for function in functions if isinstance(function, dict)]


def _with_each_function(chat: TemplateInput, change: Callable[[Schema], Schema]) -> TemplateInput:
    tools = [
        tool | {"function": change(tool["function"])}
        if isinstance(tool.get("function"), dict)
        else tool
        for tool in chat.tools or ()
    ]
    return chat._replace(tools=tools)


def _parameters(function: Schema) -> Schema:
    parameters = function.get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def _properties(function: Schema) -> dict[str, Schema]:
    """Return the schemas of a function's arguments, except for true and false."""
    properties = _parameters(function).get("properties")
    schemas = properties.items() if isinstance(properties, dict) else ()
    return {name: schema for name, schema in schemas if isinstance(schema, dict)}


def _all_properties(chat: TemplateInput) -> list[Schema]:
    return [schema for function in _functions(chat) for schema in _properties(function).values()]


def _with_each_property(chat: TemplateInput, change: Callable[[Schema], Schema]) -> TemplateInput:
    def changed(function: Schema) -> Schema:
        properties = {name: change(schema) for name, schema in _properties(function).items()}
        if not properties:
            return function
        parameters = _parameters(function)
        properties = parameters["properties"] | properties
        return function | {"parameters": parameters | {"properties": properties}}

    return _with_each_function(chat, changed)


def _with_plain_type(schema: Any) -> Schema:
    """Return a schema whose type is one name. An unknown type becomes string."""
    if not isinstance(schema, dict):
        return {"type": "string"}
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), None)
    if kind not in _PLAIN_TYPES:
        return schema | {"type": "string"}
    plain = schema | {"type": kind}
    if kind == "array":
        plain["items"] = _with_plain_type(schema.get("items"))
    if kind == "object":
        plain["additionalProperties"] = _with_plain_type(schema.get("additionalProperties"))
    return plain
