"""GET /api/tags, /api/ps and /api/version, and POST /api/show: Ollama's description of models."""

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from msgspec import Struct

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Ready
from moeserve.protocol import Answer, VersionResponse
from moeserve.server.call import HttpCall
from moeserve.server.dialects.ollama import served
from moeserve.server.model_facts import ModelFacts, capabilities, facts_of
from moeserve.server.requests import OpenName

# The version of Ollama whose API this is. Clients refuse versions that are older than they need.
API_VERSION = "0.30.0"
# Ollama's time until a model is unloaded, if it stays loaded: all nanoseconds of a 64-bit number
_FOREVER = timedelta(microseconds=2**63 / 1000)
# Sampling default -> its name in `parameters`
_PARAMETERS = {"repetition_penalty": "repeat_penalty"}
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_UNITS = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))


class ModelDetails(Struct, kw_only=True):
    """What a list of models shows of each."""

    parent_model: str = ""
    format: str  # safetensors or gguf
    family: str  # the architecture
    families: list[str]
    parameter_size: str  # such as 30.5B
    quantization_level: str  # such as BF16 or Q4_K_M
    context_length: int
    embedding_length: int | None = None


class ListedModel(Struct, kw_only=True):
    """A model in /api/tags."""

    name: str
    model: str
    modified_at: str  # of the files
    size: int  # of the files, in bytes
    digest: str  # equal for equal weights
    details: ModelDetails
    capabilities: list[str]


class ListedModels(Answer, kw_only=True):
    """The models that can be used: one, under each of its names."""

    models: list[ListedModel]


class LoadedModel(Struct, kw_only=True):
    """A model in /api/ps."""

    name: str
    model: str
    size: int  # of the weights in memory, in bytes
    digest: str
    details: ModelDetails
    expires_at: str  # when it would be unloaded: never
    size_vram: int  # the part of `size` in the memory of GPUs
    context_length: int


class LoadedModels(Answer, kw_only=True):
    """The models that are loaded: one, under each of its names."""

    models: list[LoadedModel]


class ShowRequest(Struct, kw_only=True):
    """The model to describe, by either name. The other fields have no effect."""

    model: OpenName | None = None
    name: OpenName | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None
    verbose: bool | None = None


class ShownModel(Answer, kw_only=True):
    """The description of a model."""

    license: str = ""
    modelfile: str
    parameters: str  # the context length and defaults of sampling, one per line
    template: str  # the chat template, in Jinja
    details: ModelDetails
    model_info: dict[str, Any]  # by GGUF's keys
    capabilities: list[str]  # of completion, tools, thinking and insert
    modified_at: str


class _Described(Struct):
    """The served model, with what its files say."""

    ready: Ready
    facts: ModelFacts
    digest: str
    modified_at: str  # the time of the last change of the files

    def details(self) -> ModelDetails:
        """Return the details that all answers have."""
        facts = self.facts
        return ModelDetails(
            format=facts.format,
            family=facts.architecture,
            families=[facts.architecture],
            parameter_size=_human_number(self.ready.num_params),
            quantization_level=facts.quantization,
            context_length=self.ready.max_model_len,
            embedding_length=facts.metadata.get(f"{facts.architecture}.embedding_length"),
        )


async def tags(call: HttpCall) -> web.StreamResponse:
    """List the served model under each of its names, in Ollama's shape."""
    front, ready = call.context.serving()
    described = await _describe(call, front, ready)
    models = [
        ListedModel(
            name=name,
            model=name,
            modified_at=described.modified_at,
            size=described.facts.num_bytes or ready.weight_bytes,
            digest=described.digest,
            details=described.details(),
            capabilities=capabilities(front),
        )
        for name in front.model_names
    ]
    return call.answer(ListedModels(models=models))


async def ps(call: HttpCall) -> web.StreamResponse:
    """List the loaded model under each of its names, in Ollama's shape."""
    front, ready = call.context.serving()
    described = await _describe(call, front, ready)
    expires_at = datetime.fromtimestamp(call.context.created, UTC) + _FOREVER
    models = [
        LoadedModel(
            name=name,
            model=name,
            size=ready.weight_bytes,
            digest=described.digest,
            details=described.details(),
            expires_at=f"{expires_at:{_TIME}}",
            size_vram=0 if ready.device.startswith("cpu") else ready.weight_bytes,
            context_length=ready.max_model_len,
        )
        for name in front.model_names
    ]
    return call.answer(LoadedModels(models=models))


async def show(call: HttpCall) -> web.StreamResponse:
    """Describe the model, in Ollama's shape."""
    request = await call.read(ShowRequest)
    if not (name := request.model or request.name):
        raise InvalidRequest("model is required", param="model")
    call.ignored = [
        field for field in ("system", "template", "options", "verbose") if getattr(request, field)
    ]
    front, ready = served(call, name)
    described = await _describe(call, front, ready)
    facts = described.facts
    template = front.chat_template
    info = {
        "general.architecture": facts.architecture,
        "general.basename": name,
        "general.parameter_count": ready.num_params,
        # Of this server, which may have less than the model was trained for. Some clients read the
        # first key of this name, so it comes before those of `rope.scaling`.
        f"{facts.architecture}.context_length": ready.max_model_len,
    }
    info = {**info, **facts.metadata, **info}
    shown = ShownModel(
        license=facts.license,
        modelfile=f"FROM {front.model_name}\n",
        parameters=_parameters({"num_ctx": ready.max_model_len} | front.defaults),
        template="" if template is None else template.source,
        details=described.details(),
        model_info=info,
        capabilities=capabilities(front),
        modified_at=described.modified_at,
    )
    return call.answer(shown)


async def ollama_version(call: HttpCall) -> web.StreamResponse:
    """Return the version of Ollama whose API this server has."""
    return call.answer(VersionResponse(version=API_VERSION))


async def _describe(call: HttpCall, front: FrontEnd, ready: Ready) -> _Described:
    facts = await asyncio.to_thread(facts_of, front)
    identity = ready.checkpoint or f"{front.model_name} {ready.num_params}"  # random weights
    digest = hashlib.sha256(identity.encode()).hexdigest()
    modified = datetime.fromtimestamp(facts.modified_s or call.context.created, UTC)
    return _Described(ready, facts, digest, f"{modified:{_TIME}}")


def _human_number(number: int) -> str:
    """Return a number of parameters as Ollama writes it. 30,532,122,624 -> 30.5B"""
    for size, unit, digits in _UNITS:
        if number >= size:
            return f"{number / size:.{0 if number % size == 0 else digits}f}{unit}"
    return str(number)


def _parameters(values: dict[str, Any]) -> str:
    return "\n".join(f"{_PARAMETERS.get(name, name):<30} {value}" for name, value in values.items())
