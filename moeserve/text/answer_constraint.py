"""The grammar of a chat answer, from tools and structured output.

Errors name the fields of the request.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moeserve.sampling import GrammarSpec
from moeserve.text.answer_format import AnswerFormat, Tool, ToolFault
from moeserve.text.answer_grammar import schemas_of, tool_name
from moeserve.text.json_schema import GrammarFault
from moeserve.text.structured_outputs import Constraint, either, grammar_of


class AnswerConstraint(NamedTuple):
    """The grammar of an answer."""

    grammar: GrammarSpec
    param: str  # the request's field that holds the constraint
    content: tuple[GrammarSpec, str] | None  # the constraint on the content, with its field
    tools: Sequence[Tool]  # the tools that the model may call
    names: Sequence[str]  # the names of the request's tools
    required: bool  # all calls match the schemas of their tools

    def parts(self) -> Iterator[tuple[GrammarSpec, str]]:
        """Yield the parts of the grammar, each with its field of the request.

        They are for errors: if the grammar does not compile, one of its parts does not either.
        """
        for spec, tool in schemas_of(self.tools, required=self.required):
            yield spec, _field(self.names, tool, "parameters")
        if self.content is not None:
            yield self.content


def answer_constraint(
    answer_format: AnswerFormat,
    tools: Sequence[Tool],
    names: Sequence[str],
    *,
    forced: bool,
    parallel: bool,
    content: Constraint | None,
    prompt: str,
) -> AnswerConstraint | None:
    """Return the constraint on an answer; None if any answer is allowed. Raise InvalidRequest.

    Args:
        answer_format: The format of the model's answers.
        tools: The tools that the model may call.
        names: The names of the request's tools, in the request's order.
        forced: At least one tool has to be called. Such answers have no content to constrain.
        parallel: More than one call is allowed.
        content: The constraint on the content.
        prompt: The rendered prompt.
    """
    grammar = None
    content_part = None
    required = forced or content is not None
    param = "tools"
    try:
        if tools:
            grammar = answer_format.constraint(
                tools, required=required, parallel=parallel, prompt=prompt
            )
        if content is not None and not forced:
            param = content.field
            spec = grammar_of(content.params, param)
            content_part = (spec, param)
            content_grammar = answer_format.after_reasoning(spec, prompt=prompt)
            if grammar is None:
                grammar = content_grammar
            else:
                grammar = either(grammar, content_grammar)
    except ToolFault as fault:
        raise fault.as_request_error(_field(names, fault.tool, fault.field)) from fault
    except GrammarFault as fault:
        raise fault.as_request_error(param) from fault
    if grammar is None:
        return None
    return AnswerConstraint(
        grammar,
        param=param,
        content=content_part,
        tools=tools,
        names=names,
        required=required,
    )


def _field(names: Sequence[str], tool: Tool, field: str) -> str:
    """Return the request's field of a tool."""
    return f"tools[{names.index(tool_name(tool))}].function.{field}"
