"""Run the coding agents that are on the PATH against a server, and print what worked.

    moeserve serve MODEL --max-model-len 65536
    python -m tools.try_agents [NAME ...] --url http://127.0.0.1:8000

The agents are set up as `moeserve agent` does it, in a home directory of their own. They talk to
the server through a proxy that records requests and answers. The model may write gibberish: for
the round trip with a tool, the proxy leaves one tool with constant arguments in one request and
requires a call, so that the server's grammar writes the call. It changes nothing else.

The columns: the first chat; whether it was streamed; a round trip with a tool; the prompt tokens of
the next turn in the same conversation that were in the prefix cache; a picture in a tool's result;
turns that together exceed the context, and the same with an agent that believes in twice the
context. --logs has the agents' output and all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from moeserve.cli.agent_setup import Server, agent_table, set_up, write_files

ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
HELLO = "Say hello."
AGAIN = "Say hello once more."
NOTE = "a note for the agent"
TURN_S = 540.0
NUM_LONG_TURNS = 4
STORY = "The old man told the children a story about a fox and a lantern in the dark wood. "
USAGE = re.compile(r'"(prompt_tokens|input_tokens|cached_tokens|cache_read_input_tokens)":\s*(\d+)')
# One grey pixel
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True)
class Call:
    """A tool, and the arguments of its call. {work} is the working directory."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """How an agent is run for one turn. {prompt} is the prompt."""

    ask: Sequence[str]
    again: Sequence[str] = ()  # the next turn of the same conversation; (): it has none
    tool: Call | None = None
    picture: Call | None = None
    version: Sequence[str] = ("--version",)


TRIALS = {
    "claude": Trial(
        ["-p", "{prompt}", "--allowedTools", "Read"],
        ["-p", "{prompt}", "--continue", "--allowedTools", "Read"],
        Call("Read", {"file_path": "{work}/note.txt"}),
        Call("Read", {"file_path": "{work}/pixel.png"}),
    ),
    "codex": Trial(
        ["exec", "--skip-git-repo-check", "{prompt}"],
        ["exec", "resume", "--last", "--skip-git-repo-check", "{prompt}"],
        Call("exec_command", {"cmd": "cat note.txt"}),
        Call("view_image", {"path": "{work}/pixel.png"}),
    ),
    "opencode": Trial(
        ["run", "{prompt}"],
        ["run", "--continue", "{prompt}"],
        Call("read", {"filePath": "{work}/note.txt"}),
        Call("read", {"filePath": "{work}/pixel.png"}),
    ),
    "qwen-code": Trial(
        ["{prompt}"],
        ["--continue", "{prompt}"],
        Call("read_file", {"file_path": "{work}/note.txt"}),
        Call("read_file", {"file_path": "{work}/pixel.png"}),
    ),
    "pi": Trial(
        ["-p", "{prompt}"],
        ["-p", "--continue", "{prompt}"],
        Call("read", {"path": "{work}/note.txt"}),
        Call("read", {"path": "{work}/pixel.png"}),
    ),
    "cline": Trial(
        ["{prompt}"],
        tool=Call("read_files", {"files": [{"path": "{work}/note.txt"}]}),
        picture=Call("read_files", {"files": [{"path": "{work}/pixel.png"}]}),
    ),
    "continue": Trial(
        ["-p", "{prompt}"],
        ["-p", "--resume", "{prompt}"],
        Call("Read", {"filepath": "{work}/note.txt"}),
        Call("Read", {"filepath": "{work}/pixel.png"}),
    ),
    "copilot": Trial(
        ["-p", "{prompt}", "--allow-all-tools"],
        ["-p", "{prompt}", "--allow-all-tools", "--continue"],
        Call("view", {"path": "{work}/note.txt"}),
        Call("view", {"path": "{work}/pixel.png"}),
    ),
    "hermes": Trial(
        ["chat", "-Q", "-q", "{prompt}"],
        ["chat", "--continue", "-Q", "-q", "{prompt}"],
        Call("read_file", {"path": "{work}/note.txt"}),
    ),
    "kimi": Trial(
        ["-p", "{prompt}"],
        ["-p", "{prompt}", "--continue"],
        Call("Read", {"path": "{work}/note.txt"}),
        Call("ReadMediaFile", {"path": "{work}/pixel.png"}),
    ),
    "vibe": Trial(
        ["--auto-approve", "-p", "{prompt}"],
        ["--auto-approve", "--continue", "-p", "{prompt}"],
        Call("read_file", {"path": "{work}/note.txt"}),
    ),
    "openhands": Trial(
        ["--headless", "--task", "{prompt}"],
        ["--headless", "--resume", "--last", "--task", "{prompt}"],
        Call("terminal", {"command": "cat note.txt"}),
    ),
    "aider": Trial(
        ["--message", "{prompt}", "--yes-always", "--no-git", "--no-check-update"],
        ["--message", "{prompt}", "--yes-always", "--no-git", "--restore-chat-history"],
    ),
    "gptme": Trial(
        ["--non-interactive", "{prompt}"],
        ["--non-interactive", "-r", "{prompt}"],
        Call("shell", {"command": "cat note.txt"}),
    ),
    "open-interpreter": Trial(["--plain", "--auto_run", "--stdin"]),
    "sgpt": Trial(["--chat", "t", "{prompt}"], ["--chat", "t", "{prompt}"]),
    "llm": Trial(
        ["-T", "llm_version", "{prompt}"],
        ["--continue", "{prompt}"],
        Call("llm_version", {}),
    ),
}


@dataclass
class Exchange:
    """A request to generate, and its answer."""

    path: str
    body: dict[str, Any]
    status: int = 0  # 0: the client left before the answer
    answer: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def read_usage(self) -> bool:
        """Take the counts from the answer. Return whether it has them."""
        counts = {name: int(num) for name, num in USAGE.findall(self.answer)}
        cached = counts.get("cached_tokens", counts.get("cache_read_input_tokens"))
        if cached is None:
            return False
        self.cached_tokens = cached
        self.prompt_tokens = counts.get("prompt_tokens", counts.get("input_tokens", 0))
        if "cache_read_input_tokens" in counts:  # not in Anthropic's count of input tokens
            self.prompt_tokens += cached
        return True


class Recorder:
    """A proxy that records what agents and server say to each other."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.exchanges: list[Exchange] = []
        self.call: Call | None = None  # to be forced in the next request that offers the tool
        self._turn = asyncio.Lock()  # one request at a time, so that /metrics shows its cache hits

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Return the proxy's URL."""
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{tail:.*}", self._forward)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        ) as self._session:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.path not in ROUTES:
            return await self._pass_on(request, data, None)
        exchange = Exchange(request.path, json.loads(data))
        self.exchanges.append(exchange)
        if self.call is not None and force(exchange.body, self.call):
            self.call = None
            data = json.dumps(exchange.body).encode()
        async with self._turn:
            before = await self._cache()
            try:
                response = await self._pass_on(request, data, exchange)
            finally:  # some clients leave right after the last event
                has_usage = exchange.read_usage()
            if exchange.status == 200 and not has_usage:
                await self._count(exchange, before)
        return response

    async def _count(self, exchange: Exchange, before: tuple[int, int]) -> None:
        """Take the counts of an answer without usage from the server's metrics."""
        for _ in range(20):  # the engine counts a moment later
            queries, hits = await self._cache()
            exchange.prompt_tokens = queries - before[0]
            exchange.cached_tokens = hits - before[1]
            if exchange.prompt_tokens:
                break
            await asyncio.sleep(0.1)

    async def _pass_on(
        self, request: web.Request, data: bytes, exchange: Exchange | None
    ) -> web.StreamResponse:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in ("host", "content-length", "accept-encoding", "connection")
        }
        async with self._session.request(
            request.method, self.upstream + request.path_qs, data=data, headers=headers
        ) as answer:
            if exchange is not None:
                exchange.status = answer.status
            passed = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in ("content-length", "transfer-encoding", "connection")
            }
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            with suppress(ConnectionResetError):  # some agents leave in the middle of an answer
                async for piece in answer.content.iter_any():
                    if exchange is not None:
                        exchange.answer += piece.decode("utf-8", "replace")
                    await response.write(piece)
                await response.write_eof()
            return response

    async def _cache(self) -> tuple[int, int]:
        """Return the prompt tokens that were looked up in the prefix cache, and those found."""
        async with self._session.get(f"{self.upstream}/metrics") as response:
            text = await response.text()
        counts = [
            re.findall(rf"^moeserve:prefix_cache_{name}_total\{{.*\}} (.*)$", text, re.MULTILINE)
            for name in ("queries", "hits")
        ]
        return sum(map(int, map(float, counts[0]))), sum(map(int, map(float, counts[1])))


def force(body: dict[str, Any], call: Call) -> bool:
    """Leave only the tool of `call` in a request, with constant arguments, and require a call.

    Returns whether the request offers the tool.
    """
    for tool in body.get("tools") or []:
        function = tool.get("function", tool)
        if function.get("name") != call.tool:
            continue
        schema = {
            "type": "object",
            "properties": {name: {"const": value} for name, value in call.arguments.items()},
            "required": list(call.arguments),
            "additionalProperties": False,
        }
        function["input_schema" if "input_schema" in function else "parameters"] = schema
        function.pop("strict", None)
        body["tools"] = [tool]
        body["tool_choice"] = {"type": "any"} if "input_schema" in function else "required"
        return True
    return False


@dataclass
class Session:
    """An agent in a home and a working directory of its own."""

    name: str
    server: Server
    recorder: Recorder
    folder: Path
    log: Path
    seen: list[Exchange] = field(default_factory=list)  # of the last turn

    def __post_init__(self) -> None:
        self.work = self.folder / "work"
        self.work.mkdir(parents=True)
        (self.work / "note.txt").write_text(NOTE + "\n")
        (self.work / "pixel.png").write_bytes(PIXEL)
        self.agent = agent_table()[self.name]
        settings = self.folder / "settings"
        self.setup = set_up(self.agent, self.server, settings)
        write_files(self.setup, settings)
        self.env = {
            "HOME": str(self.folder),
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "TERM": "xterm",
            "NO_COLOR": "1",
        } | self.setup.env

    async def turn(self, words: Sequence[str], prompt: str, call: Call | None = None) -> bool:
        """Run the agent once. Return whether it ended well and all of its requests, too."""
        filled = [word.format(prompt=prompt) if "{prompt}" in word else word for word in words]
        self.recorder.call = call and Call(
            call.tool,
            json.loads(json.dumps(call.arguments).replace("{work}", str(self.work))),
        )
        first = len(self.recorder.exchanges)
        stdin = "" if filled != list(words) else prompt
        code, output = await self.command([*self.setup.args, *filled], stdin)
        self.seen = self.recorder.exchanges[first:]
        statuses = [exchange.status for exchange in self.seen]
        with self.log.open("a") as log:
            log.write(f"\n$ {self.agent.command} {' '.join(filled)[:300]}\n{output}\n")
            log.write(f"exit status {code}; requests {statuses}\n")
            for exchange in self.seen:
                line = {
                    "path": exchange.path,
                    "status": exchange.status,
                    "prompt_tokens": exchange.prompt_tokens,
                    "cached_tokens": exchange.cached_tokens,
                    "body": exchange.body,
                    "answer": exchange.answer,
                }
                log.write(json.dumps(line) + "\n")
        return code == 0 and bool(statuses) and set(statuses) <= {0, 200} and 200 in statuses

    async def command(self, words: Sequence[str], stdin: str = "") -> tuple[int, str]:
        """Run the agent's command. Return its exit status and its output."""
        process = await asyncio.create_subprocess_exec(
            self.agent.command,
            *words,
            cwd=self.work,
            env=self.env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(TURN_S):
                output, _ = await process.communicate(stdin.encode())
        except TimeoutError:
            process.kill()
            return -1, f"no end after {TURN_S:g} s"
        return process.returncode or 0, output.decode("utf-8", "replace")

    def longest(self) -> Exchange:
        """Return the request of the last turn with the longest prompt."""
        return max(self.seen, key=lambda exchange: exchange.prompt_tokens)


async def try_agent(
    name: str, server: Server, recorder: Recorder, logs: Path, *, short: bool = False
) -> list[str]:
    """Return the row of an agent. short: without the long conversations."""
    trial = TRIALS[name]
    log = logs / f"{name}.log"
    log.write_text("")

    def session(context: int = server.context) -> Session:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        folders.append(folder)
        return Session(name, server._replace(context=context), recorder, folder, log)

    folders: list[Path] = []
    try:
        agent = session()
        _, version = await agent.command(trial.version)
        number = re.search(r"\d+\.\d+[\w.]*", version)
        row = [agent.agent.title, number[0] if number else "?"]
        good = await agent.turn(trial.ask, HELLO)
        row.append(_mark(good))
        if not good:
            return row
        row.append(_mark(any(exchange.body.get("stream") for exchange in agent.seen)))
        num_prompt = agent.longest().prompt_tokens
        row.append(await _tool(session(), trial))
        row.append(await _second_turn(agent, trial))
        row.append(await _picture(session(), trial))
        for context in () if short else (server.context, 2 * server.context):
            row.append(await _overflow(session(context), trial, server, num_prompt))
        return row
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


async def _tool(agent: Session, trial: Trial) -> str:
    if trial.tool is None:
        return "-"
    good = await agent.turn(trial.ask, "Read the note.", trial.tool)
    return _mark(good and _has_result(agent.seen))


async def _second_turn(agent: Session, trial: Trial) -> str:
    if not trial.again:
        return "-"
    good = await agent.turn(trial.again, AGAIN)
    if not good:
        return _mark(good)
    longest = agent.longest()
    return f"{longest.cached_tokens:,} of {longest.prompt_tokens:,}"


async def _picture(agent: Session, trial: Trial) -> str:
    if trial.picture is None:
        return "-"
    good = await agent.turn(trial.ask, "Look at the picture.", trial.picture)
    good = good and _has_result(agent.seen)
    if good and trial.again:
        good = await agent.turn(trial.again, AGAIN)
    return _mark(good)


async def _overflow(agent: Session, trial: Trial, server: Server, num_prompt: int) -> str:
    """Turns that fit one by one, but not together."""
    if not trial.again:
        return "-"
    num_tokens = int((server.context - num_prompt) / NUM_LONG_TURNS * 1.4)
    story = STORY * (4 * num_tokens // len(STORY))  # about four characters are a token
    seen: list[int] = []
    for i in range(NUM_LONG_TURNS):
        words = trial.again if i else trial.ask
        good = await agent.turn(words, f"Remember: {story}")
        seen += [exchange.status for exchange in agent.seen]
        if not good and 400 not in seen:
            return f"no: {seen}"
        if 400 in seen:
            return "compacts" if 200 in seen[seen.index(400) :] else "stops"
    return "compacts before"


def _has_result(seen: Sequence[Exchange]) -> bool:
    """Whether a request after the first one had a tool's result."""
    marks = ('"role": "tool"', '"tool_result"', "_call_output")
    texts = [json.dumps(exchange.body) for exchange in seen if exchange.status == 200]
    return any(mark in text for text in texts[1:] for mark in marks)


def _mark(good: bool) -> str:
    return "yes" if good else "no"


async def main() -> int:
    """Run the agents and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="agents (default: all found)")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--logs", type=Path, default=Path("agents-logs"))
    parser.add_argument("--short", action="store_true", help="leave out the long conversations")
    args = parser.parse_args()
    known = [name for name in TRIALS if shutil.which(agent_table()[name].command)]
    names = args.names or known
    if missing := [name for name in names if name not in known]:
        parser.error(f"not known, or not on the PATH: {', '.join(missing)}")
    args.logs.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(args.url.rstrip("/").removesuffix("/v1"))
    print(
        "| agent | version | chat | stream | tool | 2nd turn cached | picture | full | overflow |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    async with recorder.listening() as url, aiohttp.ClientSession() as http:
        async with http.get(f"{recorder.upstream}/v1/models") as response:
            card = (await response.json())["data"][0]
        server = Server(url, "none", card["id"], card["max_model_len"])
        for name in names:
            row = await try_agent(name, server, recorder, args.logs, short=args.short)
            print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
