"""A real front end and server on a socket, with a scripted engine behind the link."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import ollama
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from moeserve.actor.actor import Inbox
from moeserve.config import ServerConfig
from moeserve.engine.decoding import SINGLE_TOKENS, Decoding
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import (
    Abort,
    Drain,
    EngineIn,
    FinishReason,
    Logprobs,
    Phase,
    PromptLogprobs,
    Ready,
    Refused,
    StepOutput,
    StepRecord,
    Submit,
)
from moeserve.server.access_log import Observer
from moeserve.server.auth import Auth
from moeserve.server.context import Context
from moeserve.server.run import bind, listening
from moeserve.server.tls import tls_of
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.tokenizer import Tokenizer

STORY = 'Once upon a time a fox found a 😀 lantern in the old harbour, and "nobody" knew why.\n'
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 256
FIM_TOKENS = (  # Qwen's tokens to fill in the middle
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)


def make_tokenizer(fim_tokens: Sequence[str] = FIM_TOKENS) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [STORY] * 4, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken(text, normalized=False) for text in fim_tokens])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@dataclass
class _Row:
    submit: Submit
    emitted: int = 0


@dataclass
class ScriptedEngine:
    """An EngineLink that answers every request with the tokens of STORY, one per step.

    The end token follows, except for requests with a bad word, which never stop.
    """

    tokenizer: Tokenizer
    outbox: Inbox[Any] = field(default_factory=lambda: Inbox("front end"))
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: no steps
    pause_at: int | None = None  # no request gets more tokens
    refuse: str = ""  # the reason with which every request is rejected
    break_after: int | None = None  # requests fail after so many tokens,
    why: str = "secret detail /home/x"  # with this error
    told: list[EngineIn] = field(default_factory=list)
    rows: dict[int, _Row] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    healthy: bool = True
    context: int = CONTEXT

    def __post_init__(self) -> None:
        self.gate.set()
        self.end = self.tokenizer.backend.token_to_id("<|im_end|>")
        self.script = [*self.tokenizer.encode(STORY, special=False), self.end]

    def send(self, msg: EngineIn) -> None:
        self.told.append(msg)
        match msg:
            case Submit() if self.refuse:
                self.outbox.put(Refused(msg.rid, self.refuse, "refused"))
            case Submit():
                # A replay continues after the tokens that it has.
                self.rows[msg.rid] = _Row(msg, len(msg.tokens) // 4 - msg.num_prompt)
                self.wake.set()
            case Abort(rids):
                for rid in rids:
                    self.rows.pop(rid, None)
            case Drain(deadline_s):
                asyncio.get_running_loop().call_later(deadline_s, self._abort_all)

    def _abort_all(self) -> None:
        if rids := list(self.rows):
            self.rows.clear()
            self._put(rids, [-1] * len(rids), [FinishReason.ABORT] * len(rids))

    @property
    def submitted(self) -> Submit:
        """The last request that was sent."""
        return [told for told in self.told if isinstance(told, Submit)][-1]

    @property
    def prompt(self) -> str:
        """That request's prompt, decoded by the tokenizer."""
        ids = np.frombuffer(self.submitted.tokens, np.int32)[: self.submitted.num_prompt]
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def ready(self) -> Ready:
        return Ready(
            pid=1,
            architecture="Scripted",
            dtype="float32",
            device="cpu",
            vocab_size=self.tokenizer.backend.get_vocab_size(),
            max_model_len=self.context,
            max_num_seqs=64,
            num_blocks=100,
            block_size=16,
            eos_token_ids=(self.end,),
            num_params=10,
            num_active_params=5,
            weight_bytes=40,
            startup_s=0.1,
        )

    async def run(self) -> None:
        while True:
            await self.wake.wait()
            await self.gate.wait()
            if not self.rows:
                self.wake.clear()
                continue
            await asyncio.sleep(0 if self._step() else 0.001)

    def _step(self) -> bool:
        """Give each request a token; return whether any got one."""
        rids = [rid for rid, row in self.rows.items() if row.emitted != self.pause_at]
        if not rids:
            return False
        tokens = []
        finish = []
        extra = {"started": [], "cached": {}, "logprobs": {}, "prompt_logprobs": {}, "errors": {}}
        for rid in rids:
            row = self.rows[rid]
            sampling = row.submit.sampling
            if self.break_after == row.emitted:
                tokens.append(-1)
                finish.append(FinishReason.ERROR)
                extra["errors"][rid] = self.why
                del self.rows[rid]
                continue
            token = self.script[row.emitted % len(self.script)]
            if token == self.end and sampling.bad_seqs:
                token = self.script[0]
            if row.emitted == 0:
                extra["started"].append(rid)
                extra["cached"][rid] = 2
                self._prompt_logprobs(row.submit, extra["prompt_logprobs"])
            if sampling.logprobs is not None:
                extra["logprobs"][rid] = [logprob_row(token, sampling.logprobs)]
            row.emitted += 1
            tokens.append(token)
            ended = FinishReason.NONE
            if token in sampling.stop_ids:
                ended = FinishReason.STOP
            elif row.emitted >= sampling.max_tokens:
                ended = FinishReason.LENGTH
            finish.append(ended)
            if ended:
                del self.rows[rid]
        self._put(rids, tokens, finish, **extra)
        return True

    def _prompt_logprobs(self, submit: Submit, into: dict[int, PromptLogprobs]) -> None:
        if submit.sampling.prompt_logprobs is not None:
            ids = np.frombuffer(submit.tokens, np.int32)[1 : submit.num_prompt].tolist()
            into[submit.rid] = PromptLogprobs(
                1, [logprob_row(i, submit.sampling.prompt_logprobs) for i in ids]
            )

    def _put(self, rids: list[int], tokens: list[int], finish: list[int], **extra: Any) -> None:
        record = StepRecord(
            step=1,
            at_s=0.0,
            num_tokens=len(rids),
            num_requests=len(rids),
            num_running=len(self.rows),
            num_waiting=0,
            num_free_blocks=99 - len(self.rows),
            num_blocks=100,
            num_states=9,
            num_free_states=6,
            num_cached_states=2,
        )
        out = StepOutput(
            rids=np.array(rids, np.int64).tobytes(),
            tokens=np.array(tokens, np.int32).tobytes(),
            finish=bytes(finish),
            record=record,
            **extra,
        )
        self.outbox.put(out, force=True)


def logprob_row(token: int, num_top: int) -> Logprobs:
    """Return a row in which the chosen token is most likely, followed by 1, 2, 3, ..."""
    others = [i for i in range(1, 30) if i != token][: max(num_top - 1, 0)]
    top = [token, *others][:num_top]
    return Logprobs([token, *top], [-0.5, *[-0.5 - place for place in range(len(top))]], 1)


@dataclass
class Live:
    """A running server and the parts behind it."""

    url: str
    port: int
    context: Context
    engine: ScriptedEngine
    front: FrontEnd
    session: aiohttp.ClientSession

    async def post(
        self, path: str, body: Any, **headers: str
    ) -> tuple[int, Any, aiohttp.ClientResponse]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | {
            k.replace("_", "-"): v for k, v in headers.items()
        }
        async with self.session.post(
            self.url + path, data=io.BytesIO(data), headers=headers
        ) as response:
            return response.status, json.loads(await response.read()), response

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def events(self, path: str, body: Any) -> list[Any]:
        """Return the data of each event of a stream; the last one must be [DONE]."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            raw = (await response.read()).decode()
        frames = raw.split("\n\n")
        assert frames.pop() == ""
        datas = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
        assert datas.pop() == "[DONE]"
        return [json.loads(data) for data in datas]

    async def typed_events(self, path: str, body: Any) -> list[Any]:
        """Return the data of each named event; names must equal the data's types."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            frames = (await response.read()).decode().split("\n\n")
        assert frames.pop() == ""
        pairs = [frame.split("\n", 1) for frame in frames if not frame.startswith(":")]
        found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
        assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in found]
        return found

    async def raw(self, data: bytes) -> bytes:
        """Send bytes; return what the server sends until it closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        out = b""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(20):
                out = await reader.read()
        writer.close()
        return out


@asynccontextmanager
async def live_server(
    tokenizer: Tokenizer,
    *,
    ready: bool = True,
    defaults: dict[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    context: int = CONTEXT,
    decoding: Decoding = SINGLE_TOKENS,
    **settings: Any,
) -> AsyncIterator[Live]:
    config = ServerConfig(port=0, **settings)
    engine = ScriptedEngine(tokenizer, context=context)
    front = FrontEnd(
        engine,
        model_name="org/tiny",
        model_dir=Path("/nowhere"),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(TEMPLATE),
        defaults=defaults or {},
        max_queued=config.max_queued_requests,
        max_wait_s=config.max_queue_wait,
        resume_window_s=config.resume_window,
        decoding=decoding,
    )
    state = Context(
        config,
        Auth(config),
        front if ready else None,
        tls=tls_of(config),
        observers=list(observers),
    )
    sock = bind(config)
    port = sock.getsockname()[1]
    if ready:
        engine.outbox.put(Phase("loading", 50, 0.1))
        engine.outbox.put(engine.ready())
    tasks = [asyncio.create_task(job) for job in (front.run(), engine.run())]
    try:
        async with listening(sock, state), aiohttp.ClientSession(read_bufsize=2**20) as session:
            if ready:
                await front.wait_ready()
                state.started = True
            yield Live(
                f"http{'s' if state.tls else ''}://127.0.0.1:{port}",
                port,
                state,
                engine,
                front,
                session,
            )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture
async def live(tokenizer: Tokenizer) -> AsyncIterator[Live]:
    async with live_server(tokenizer) as it:
        yield it


@pytest.fixture
def launch(tokenizer: Tokenizer) -> Any:
    """Return live_server with other settings."""
    return lambda **settings: live_server(tokenizer, **settings)


@pytest.fixture
def story() -> str:
    return STORY


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@pytest.fixture
async def ollama_client(live):
    """PyPI's client of Ollama's API."""
    async with ollama.AsyncClient(host=live.url) as client:
        yield client
