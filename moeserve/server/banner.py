"""The lines that the server prints when it starts: where it listens, what it serves, and how to talk to it."""

from __future__ import annotations

import socket

from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Ready
from moeserve.server.app import Context
from moeserve.version import __version__

_OPEN_HOSTS = ("127.0.0.1", "::1", "localhost")


def base_url(sock: socket.socket) -> str:
    """Returns a URL under which this machine reaches the server."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def hello(context: Context, sock: socket.socket) -> str:
    """Returns the first line, printed while the model is still loading."""
    warning = ""
    if not context.auth.required and context.config.host not in _OPEN_HOSTS:
        warning = "; ANYONE who reaches this address may use it: set --api-key-file"
    return f"{base_url(sock)} (moeserve {__version__}; loading the model){warning}"


def ready_lines(context: Context, front: FrontEnd, ready: Ready, sock: socket.socket, seconds: float) -> list[str]:
    """Returns the lines for people, printed once the model is ready. seconds: how long the start took."""
    url, model = base_url(sock), front.model_name
    tokens = (ready.num_blocks - 1) * ready.block_size
    lines = [
        "",
        f"moeserve {__version__} is ready in {seconds:.1f} s: {url}",
        f"  model    {model}: {ready.architecture}, {_count(ready.num_params)} parameters, "
        f"{_count(ready.num_active_params)} active, {ready.dtype} on {ready.device}, {_size(ready.weight_bytes)}",
        f"  context  {ready.max_model_len:,} tokens; cache {tokens:,} tokens; {ready.max_num_seqs} sequences at once",
        *_ranks(front),
        f"  keys     {'required' if context.auth.required else 'none needed'}; routes: {url}/openapi.json",
        *[f"  note     {note}" for note in ready.notes],
        "",
    ]
    if front.chat_template is not None:
        lines += [*_how_to_talk(url, model, keyed=context.auth.required), ""]
    return lines


def _ranks(front: FrontEnd) -> list[str]:
    if front.fleet is None:
        return []
    view = front.fleet.view
    how = f"experts over {view.dp * view.tp} ranks" if view.together else "each on its own"
    pids = ", ".join(str(engine.pid) for engine in view.engines)
    return [f"  ranks    {view.dp} engines (dp) of {view.tp} processes (tp), {how}; engine processes {pids}"]


def _how_to_talk(url: str, model: str, *, keyed: bool) -> list[str]:
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    body = f'{{"messages": [{{"role": "user", "content": "Tell me a story."}}], "stream": true, "model": "{model}"}}'
    argument = ', api_key="KEY"' if keyed else ""
    return [
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'",
        "",
        "import asyncio, moeserve",
        f'client = moeserve.AsyncClient(base_url="{url}/v1"{argument})',
        'ask = client.chat.completions.create(messages=[{"role": "user", "content": "Tell me a story."}])',
        "print(asyncio.run(ask).choices[0].message.content)",
    ]


def _count(number: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
