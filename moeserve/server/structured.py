"""The fields of a request that constrain the text of its answer.

`response_format` is OpenAI's, `structured_outputs` vLLM's, `guided_*` are vLLM's older names.
`strict` of a JSON schema has no effect: every schema is enforced.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from moeserve.errors import InvalidRequest
from moeserve.sampling import Choices, NonEmpty, StructuredOutputsParams
from moeserve.text.structured_outputs import Constraint


class JsonSchema(Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # for json_object, as in llama.cpp and Together
    structures: list[Any] | None = None  # for structural_tag, like triggers
    triggers: list[Any] | None = None


class StructuredFields(Struct, kw_only=True):
    """The fields of a request body about structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: Choices | None = None
    guided_grammar: NonEmpty | None = None
    guided_whitespace_pattern: str | None = None

    def constraint(self) -> Constraint | None:
        """Return the constraint; None without one.

        Raises InvalidRequest for several constraints or contradicting fields.
        """
        options = self.structured_outputs or StructuredOutputsParams()
        # Field of the request -> (field of StructuredOutputsParams, value)
        constraints: dict[str, tuple[str, Any]] = {
            f"structured_outputs.{name}": (name, value) for name, value in options.given.items()
        }
        for name in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                constraints[f"guided_{name}"] = (name, value)
        if self.response_format is not None:
            constraints |= _response_format(self.response_format)
        if len(constraints) > 1:
            names = " and ".join(sorted(constraints))
            raise InvalidRequest(
                f"{names} contradict each other: a request has one constraint",
                param=max(constraints),
            )
        if not constraints:
            if self.structured_outputs is None:
                return None
            return Constraint(options, "structured_outputs")
        (field,) = constraints
        name, value = constraints[field]
        pattern = options.whitespace_pattern or self.guided_whitespace_pattern
        params = replace(options, **{name: value}, whitespace_pattern=pattern)
        return Constraint(params, field)


def _response_format(form: ResponseFormat) -> dict[str, tuple[str, Any]]:
    """Return the constraint in the form that `constraint` collects; empty for type text."""
    given = {
        name: value
        for name in form.__struct_fields__[1:]
        if (value := getattr(form, name)) is not None
    }
    allowed = {
        "json_object": ["schema"],
        "json_schema": ["json_schema"],
        "structural_tag": ["structures", "triggers"],
    }.get(form.type, [])
    if surplus := sorted(given.keys() - allowed):
        name = f"response_format.{surplus[0]}"
        raise InvalidRequest(f"{name} does not belong to type {form.type}", param=name)
    match form.type:
        case "json_object" if form.schema is not None:
            return {"response_format.schema": ("json", form.schema)}
        case "json_object":
            return {"response_format": ("json_object", True)}
        case "json_schema":
            if form.json_schema is None:
                raise InvalidRequest(
                    "response_format.json_schema is required", param="response_format.json_schema"
                )
            return {"response_format.json_schema.schema": ("json", form.json_schema.schema)}
        case "structural_tag":
            return {"response_format": ("structural_tag", given)}
    return {}
