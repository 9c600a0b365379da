"""Render chat templates with the histories of agents, and report what a model would not see.

    python -m tools.render_templates FOLDER

A pair of a template (`*.jinja` of the folder) and a history (`agent_histories.py`) has a fault if

- the server refuses it;
- the prompt has a word that nobody wrote: None, null, undefined, [object, or an empty turn;
- a text of the history is missing.

Exit status 1: there are faults.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import tokenizers
from jinja2.ext import loopcontrols

from moeserve.errors import MoeserveError
from moeserve.server.chat_request import ChatRequest, chat_tools
from moeserve.server.conversation import rendered_chat
from moeserve.server.dialects.messages_request import MessagesRequest
from moeserve.server.dialects.responses_request import ResponsesRequest
from moeserve.server.dialects.responses_tools import ResponseTools
from moeserve.server.requests import decode
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.template_sandbox import GenerationTag
from moeserve.text.template_sandbox import render as sandbox_render
from moeserve.text.tokenizer import Tokenizer, unshield
from tools.agent_histories import ANSWER, HISTORIES, MORE, USER, History, call, calls, chat

_WRITTEN_BY_NOBODY = re.compile(r"None|null|[Uu]ndefined|\[object")
_TEXT = re.compile(r"[^\W_]+_(?:word|thought)")
_MAX_MODEL_LEN = 2**20


class Fault(NamedTuple):
    """Why a prompt is wrong."""

    template: str
    history: str
    kind: str  # "refused", "nobody's word", "empty turn" or "lost"
    detail: str


class TemplateCheck:
    """One template, and what its prompts have in every conversation."""

    def __init__(self, name: str, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.name = name
        self._template = template
        self._tokenizer = tokenizer
        self._own_words = {
            word
            for literal in literals(template.source_for_tools)
            for word in _WRITTEN_BY_NOBODY.findall(literal)
        }
        self._empty_turn = self._find_empty_turn()
        if self._writes_empty_turns():
            self._empty_turn = None

    def faults(self, history: History) -> list[Fault]:
        """Return the faults of the prompt for a history."""
        try:
            prompt = self.render(history)
        except MoeserveError as error:
            return [self._fault(history, "refused", str(error))]
        faults = []
        written = json.dumps(history.body, ensure_ascii=False)
        words = [word for word in _WRITTEN_BY_NOBODY.findall(prompt) if word not in self._own_words]
        # A null of JSON may be shown as Python's None, and may stand in JSON text.
        if len(words) > written.count("null"):
            faults.append(self._fault(history, "nobody's word", " ".join(words)))
        if (
            self._empty_turn is not None
            and self._empty_turn.search(prompt)
            and not history.has_empty_turn
        ):
            faults.append(self._fault(history, "empty turn", self._empty_turn.pattern))
        lost = [text for text in missing(history, prompt) if text.endswith("_word")]
        if lost:
            faults.append(self._fault(history, "lost", " ".join(lost)))
        return faults

    def render(self, history: History) -> str:
        """Return the prompt that the model sees. Raises RequestError."""
        request = chat_request(history)
        rendering = rendered_chat(
            self._template,
            self._tokenizer,
            messages=request.messages,
            tools=chat_tools(request.tools, request.tool_choice),
            options=request,
            max_model_len=_MAX_MODEL_LEN,
        )
        return unshield(asyncio.run(rendering))

    def _fault(self, history: History, kind: str, detail: str) -> Fault:
        return Fault(self.name, history.name, kind, detail)

    def _try(self, history: History) -> str:
        try:
            return self.render(history)
        except MoeserveError:
            return ""

    def _find_empty_turn(self) -> re.Pattern[str] | None:
        """Return a pattern of an assistant's turn without content; None if turns have no marks."""
        whole = {"add_generation_prompt": False}
        turns = [
            chat("plain", USER),
            chat("plain", USER, ANSWER),
            chat("plain", USER, ANSWER, MORE),
        ]
        for turn in turns:
            turn.body.update(whole)
        asked, answered, more = map(self._try, turns)
        _, _, user_end = asked.partition("ask_word")
        _, _, answer_end = answered.partition("answer_word")
        between, _, _ = more.partition("ask_word")[2].partition("answer_word")
        head = between.removeprefix(user_end).strip()
        end = answer_end.strip()
        if not head or not end:
            return None
        return re.compile(re.escape(head) + r"\s*" + re.escape(end))

    def _writes_empty_turns(self) -> bool:
        """Return whether the template writes an empty turn at calls, whatever their content is."""
        prompts = []
        for content in ({"content": ""}, {"content": None}, {}):
            messages = [USER, calls(call("call_0001", arguments={}), **content)]
            variables = {"messages": messages, "tools": None} | self._tokenizer.special_tokens
            outcome, text = sandbox_render(self._template.source, variables, "2026-01-01")
            if outcome == "text":
                prompts.append(text)
        return self._empty_turn is not None and all(map(self._empty_turn.search, prompts))


def literals(source: str) -> list[str]:
    """Return the texts that a template may write itself."""
    tree = jinja2.Environment(extensions=[loopcontrols, GenerationTag]).parse(source)
    texts = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
    constants = [node.value for node in tree.find_all(jinja2.nodes.Const)]
    return texts + [value for value in constants if isinstance(value, str)]


def missing(history: History, prompt: str) -> list[str]:
    """Return the texts of a history that its prompt lacks."""
    written = json.dumps(history.body, ensure_ascii=False)
    # JSON text may be written again inside JSON.
    texts = dict.fromkeys(_TEXT.findall(re.sub(r"\\+[nt]", " ", written)))
    return [text for text in texts if text not in prompt]


def chat_request(history: History) -> ChatRequest:
    """Return a history as a chat, by the conversion of its route. Raises RequestError."""
    if history.route == "messages":
        message_request = decode(history.body, MessagesRequest).request
        return message_request.chat(message_request.max_tokens)
    if history.route == "responses":
        response_request = decode(history.body, ResponsesRequest).request
        return response_request.chat([], ResponseTools(response_request.tools or ()))
    return decode(history.body, ChatRequest).request


def plain_tokenizer() -> Tokenizer:
    """Return a tokenizer with the special tokens that templates read."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    model = tokenizers.models.BPE({char: i for i, char in enumerate(sorted(alphabet))}, [])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    backend.add_special_tokens(list(names.values()))
    return Tokenizer(backend, names)


def check_template(path: Path, histories: Iterable[History], *, shows: bool) -> list[Fault]:
    """Return the faults of a template's prompts. shows: print the prompts, too."""
    template = ChatTemplate.load(path.parent, path)
    assert template is not None
    check = TemplateCheck(path.stem, template, plain_tokenizer())
    faults = []
    for history in histories:
        found = check.faults(history)
        faults += found
        if shows and all(fault.kind != "refused" for fault in found):
            print(f"==== {path.stem}: {history.name}\n{check.render(history)}")
    return faults


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("folder", type=Path, help="the folder of the templates")
    flags.add_argument("--template", default="", help="only templates whose names contain this")
    flags.add_argument("--history", default="", help="only histories whose names contain this")
    flags.add_argument("--show", action="store_true", help="show the prompts, too")
    args = flags.parse_args(argv)
    paths = sorted(path for path in args.folder.glob("*.jinja") if args.template in path.stem)
    histories = [history for history in HISTORIES if args.history in history.name]
    if not paths or not histories:
        flags.error(f"{args.folder}: no such templates (*.jinja) or histories")
    faults = []
    for path in paths:
        faults += check_template(path, histories, shows=args.show)
    for fault in faults:
        print("\t".join(fault))
    num_broken = len({(fault.template, fault.history) for fault in faults})
    kinds = Counter(fault.kind for fault in faults)
    print(
        f"{len(histories)} histories x {len(paths)} templates: {num_broken} pairs with faults",
        dict(kinds),
    )
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
