"""The tools of /v1/responses, and the names under which a model sees them.

- A function is shown as it is.
- A namespace groups tools, for example those of an MCP server. Its tool `words` is shown as the
  function `NAMESPACE__words`.
- A custom tool takes plain text. It is shown as a function with one string, `input`.
- A tool that the server would have to run (web search, for example) is not shown, as if the model
  never called it.

Calls in answers and in histories have the names of the request.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from moeserve.errors import InvalidRequest
from moeserve.server.chat_request import Function, FunctionName
from moeserve.server.requests import Kinds, convert_at, typed_at

MAX_TOOLS = 1024  # including those in namespaces
INPUT = "input"  # name of a custom tool's only argument
# Types of tools that OpenAI's server runs, or that its own models know without a definition.
HOSTED = frozenset({
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search",
    "image_generation", "local_shell", "mcp", "shell", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
})  # fmt: skip


class FunctionTool(Function, kw_only=True, omit_defaults=False):
    """A function that the model may ask the client to call."""

    type: Literal["function"] = "function"


class CustomFormat(Struct, kw_only=True, omit_defaults=True):
    """The form of a custom tool's text. The model sees a grammar, which is not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Struct, kw_only=True, omit_defaults=True):
    """A tool that takes text, and that the client runs."""

    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class Namespace(Struct, kw_only=True, omit_defaults=True):
    """Tools with a common prefix."""

    name: FunctionName
    description: str | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class ToolName(NamedTuple):
    """How a request names a tool."""

    name: str
    namespace: str | UnsetType = UNSET
    is_custom: bool = False


_CLIENT_TOOLS: Kinds = {"function": FunctionTool, "custom": CustomTool}
_TOOLS: Kinds = _CLIENT_TOOLS | {"namespace": Namespace}


class ResponseTools:
    """The tools of a request."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        """Check the tools. Raises InvalidRequest that names the first invalid one."""
        self.given: list[Any] = []  # for the answer, which repeats the tools
        self.functions: list[dict[str, Any]] = []  # in the shape of chats
        self._names: dict[str, ToolName] = {}  # by the name that the model sees
        for i, tool in enumerate(tools):
            where = f"tools[{i}]"
            if is_hosted(tool):
                self.given.append(tool)
                continue
            checked = typed_at(tool, _TOOLS, where)
            if isinstance(checked, Namespace):
                self.given.append(tool)
                for j, inner in enumerate(checked.tools):
                    inner_where = f"{where}.tools[{j}]"
                    self._add(typed_at(inner, _CLIENT_TOOLS, inner_where), checked.name)
            else:
                self.given.append(checked if isinstance(checked, FunctionTool) else tool)
                self._add(checked, UNSET)
        if len(self.functions) > MAX_TOOLS:
            raise InvalidRequest(
                f"tools: {len(self.functions)} tools; at most {MAX_TOOLS} are allowed",
                param="tools",
            )
        if tools and not self.functions:
            types = ", ".join(dict.fromkeys(str(tool["type"]) for tool in tools))
            raise InvalidRequest(
                f"tools: this server runs no tools itself ({types}); it needs at least one "
                "function, custom tool or namespace, which the client runs",
                param="tools",
                code="unsupported_parameter",
            )

    def called(self, shown_name: str) -> ToolName:
        """Return how the request names a tool that the model has called."""
        return self._names.get(shown_name, ToolName(shown_name))

    def _add(self, tool: FunctionTool | CustomTool, namespace: str | UnsetType) -> None:
        shown = shown_name(tool.name, namespace)
        if isinstance(tool, CustomTool):
            function: dict[str, Any] = _text_function(tool)
        else:
            function = {
                name: value
                for name in ("description", "parameters", "strict")
                if (value := getattr(tool, name)) is not None
            }
        self.functions.append({"type": "function", "function": {"name": shown} | function})
        self._names[shown] = ToolName(tool.name, namespace, isinstance(tool, CustomTool))


def is_hosted(tool: dict[str, Any]) -> bool:
    """Whether the server would have to run a tool, which is not checked yet."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind in HOSTED


def unenforced(tools: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of fields of tools that have no effect: tools that are not shown, and
    grammars that are not enforced. The tools are not checked yet.
    """
    names = []
    for i, tool in enumerate(tools):
        form = tool.get("format")
        if is_hosted(tool):
            names.append(f"tools[{i}]")
        elif tool.get("type") == "custom" and isinstance(form, dict) and "definition" in form:
            names.append(f"tools[{i}].format")
    return names


def shown_name(name: str, namespace: str | UnsetType | None) -> str:
    """Return the name under which the model sees a tool."""
    return f"{namespace}__{name}" if namespace else name


def input_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool, as JSON text."""
    return msgspec.json.encode({INPUT: text}).decode()


def input_of(arguments: str) -> str:
    """Return the text for a custom tool. Arguments that were cut off are returned as they are."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _text_function(tool: CustomTool) -> dict[str, Any]:
    description = tool.description or ""
    form = tool.format
    if form is not None and form.definition is not None:
        grammar = f"The input must match this grammar ({form.syntax}):\n{form.definition}"
        description = f"{description}\n\n{grammar}".strip()
    text: dict[str, Any] = {"type": "string"}
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function: dict[str, Any] = {"parameters": parameters}
    if description:
        function["description"] = description
    return function


class _ChosenTool(Struct):
    name: FunctionName
    namespace: FunctionName | None = None


class _AllowedTools(Struct):
    mode: str
    tools: list[dict[str, Any]]


def chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Convert a `tool_choice` to the shape of chats, in which functions are nested a level deeper.

    Raises InvalidRequest.
    """
    if not isinstance(choice, dict):
        return choice
    kinds: Kinds = {"function": _ChosenTool, "custom": _ChosenTool, "allowed_tools": _AllowedTools}
    chosen = typed_at(choice, kinds, "tool_choice")
    if isinstance(chosen, _ChosenTool):
        return _chat_function(chosen)
    named = [
        convert_at(tool, _ChosenTool, f"tool_choice.tools[{i}]")
        for i, tool in enumerate(chosen.tools)
        if not is_hosted(tool)
    ]
    functions = [_chat_function(tool) for tool in named]
    allowed = {"mode": chosen.mode, "tools": functions}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _chat_function(tool: _ChosenTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": shown_name(tool.name, tool.namespace)}}
