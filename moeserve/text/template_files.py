"""Finds the chat templates of a model directory.

They are, in this order: the file that the user names; `chat_template.jinja`, with
`additional_chat_templates/tool_use.jinja` for requests with tools; `chat_template` in chat_template.json or
tokenizer_config.json (one text, or a list of named ones); ours, for a model whose format is published as Python code;
and what mistral-common writes for a tekken.json.
"""

import importlib
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from moeserve.errors import CheckpointError, ConfigError
from moeserve.loader.files import read_optional_json

MAX_TEMPLATE_CHARS = 2 * 2**20
_OURS = {"deepseek_v32": "deepseek_v32.jinja"}  # by model_type


class TemplateSource(NamedTuple):
    """A template's text. origin: where it is from, for error messages; for_tools: its variant for tools, if any."""

    text: str
    origin: str
    for_tools: str | None = None


def find_templates(model_dir: Path, override: Path | str | None = None) -> TemplateSource | None:
    """Returns a model's template, None if it has none, as base models. Raises CheckpointError, ConfigError."""
    if override is not None:
        if not Path(override).is_file():
            raise ConfigError(f"--chat-template {override}: no such file")
        return TemplateSource(_read(Path(override)), str(override))
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        for_tools = model_dir / "additional_chat_templates" / "tool_use.jinja"
        return TemplateSource(_read(path), str(path), _read(for_tools) if for_tools.is_file() else None)
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (found := read_optional_json(model_dir, name).get("chat_template")) is not None:
            return _named(found, f"{model_dir / name} chat_template")
    if ours := _OURS.get(str(read_optional_json(model_dir, "config.json").get("model_type"))):
        asset = files("moeserve") / "assets" / "chat_templates" / ours
        return TemplateSource(asset.read_text(encoding="utf-8"), ours)
    if (model_dir / "tekken.json").is_file():
        return _from_mistral_common(model_dir / "tekken.json")
    return None


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_CHARS + 1)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text") from error


def _named(found: Any, origin: str) -> TemplateSource:
    if not isinstance(found, list):
        found = [{"name": "default", "template": found}]
    named = {entry.get("name"): entry.get("template", 0) for entry in found if isinstance(entry, dict)}
    text, for_tools = named.get("default", next(iter(named.values()), 0)), named.get("tool_use")
    if not isinstance(text, str) or not isinstance(for_tools, str | None):
        raise CheckpointError(f"{origin} is neither a text nor a list of named texts")
    return TemplateSource(text, origin, for_tools)


def _from_mistral_common(path: Path) -> TemplateSource:
    """Returns the template that mistral-common makes for a tokenizer: versions of tekken.json differ in format."""
    try:
        module = importlib.import_module("mistral_common.integrations.chat_templates.chat_templates")
    except ImportError as error:
        raise CheckpointError(
            f"{path}: the checkpoint has no chat template; pip install 'moeserve[mistral]' for mistral-common's "
            f"({error}), or pass one with --chat-template"
        ) from error
    try:
        return TemplateSource(module.convert_tokenizer_to_chat_template(path), f"mistral-common's template for {path}")
    except Exception as error:  # the library raises many kinds, AssertionError among them
        raise CheckpointError(
            f"{path}: mistral-common makes no chat template for it: {str(error)[:200]}. Pass one with --chat-template"
        ) from error
