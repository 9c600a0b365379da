"""Open a front end: start the engine, and load the tokenizer and the chat template in parallel."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from moeserve.actor.tasks import log_error, spawn
from moeserve.cluster.check_parallel import check_parallel
from moeserve.cluster.fleet import Fleet
from moeserve.cluster.host import Root
from moeserve.cluster.link import EngineLink
from moeserve.cluster.local_engine import LocalEngine
from moeserve.config import Config
from moeserve.engine.decoding import SINGLE_TOKENS, Decoding
from moeserve.errors import ConfigError
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.receipt_signer import ReceiptSigner
from moeserve.hub.progress import TerminalProgress
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.generation_config import generation_defaults
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.logits_processors import known_names
from moeserve.models.fetch import local_config
from moeserve.models.hf_config import read_model_spec
from moeserve.text.answer_data import find_format
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.fit_calls import TEXT_CALL_FORMAT
from moeserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # time for the engine's last requests at the end


@asynccontextmanager
async def open_front_end(
    config: Config,
    *,
    child: bool,
    bounded: bool = False,
    signs: bool = True,
    prepared: FrontEnd | None = None,
) -> AsyncIterator[FrontEnd]:
    """Yield a running front end while the engine is still loading (await `wait_ready()`).

    Downloads the model if it is on a hub and not in the cache. Raises ConfigError at once for
    errors in the model's files.

    Args:
        child: Run the engine in a supervised process. False: run it on this loop, with a thread.
            Several ranks (dp, tp) always run in processes.
        bounded: Limit the queue, as configured.
        signs: Create receipts and log requests, as configured.
        prepared: A front end from `prepare`.
    """
    with TerminalProgress() as progress:
        config = await local_config(config, progress)
    model_dir = resolve_model_dir(config.model.model)
    check_parallel(config, read_model_spec(model_dir))
    link: EngineLink
    if prepared is not None:
        link = prepared.link
    elif config.parallel.standby:
        raise ConfigError("--standby: only `moeserve serve` supports a standby front end")
    else:
        link = Fleet(config) if child or config.parallel.num_ranks > 1 else LocalEngine(config)
    await link.start()  # first, because it takes longest
    try:
        front = prepared
        if front is None:
            front = await asyncio.to_thread(
                _create_front_end, config, model_dir, link, bounded=bounded, signs=signs
            )
        running = spawn(front.run(), name=front.name, on_error=log_error)
        try:
            yield front
        finally:
            front.stop()
            await running
    finally:
        await link.close(timeout_s=CLOSE_TIMEOUT_S)


async def prepare(config: Config, root: Root) -> FrontEnd:
    """Load all that a bounded front end needs. `open_front_end` starts its engines later.

    Raises ConfigError.
    """
    link = Fleet(config, root)
    model_dir = resolve_model_dir(config.model.model)
    return await asyncio.to_thread(
        _create_front_end, config, model_dir, link, bounded=True, signs=True
    )


def _create_front_end(
    config: Config, model_dir: Path, link: EngineLink, *, bounded: bool, signs: bool
) -> FrontEnd:
    """Read the model's files except for the weights, and create the front end. Blocks.

    Raises ConfigError.
    """
    model = config.model
    spec = read_model_spec(model_dir)
    if spec.num_experts:
        import moeserve.cluster.rebalancing  # noqa: F401  (slow, so here, in a thread)
    if not config.device.null_runner and model.load_format != "dummy":
        open_checkpoint(model_dir)  # to report errors before the engine has imported torch
    tokenizer = None if model.skip_tokenizer_init else Tokenizer.load(model_dir)
    template = None
    answer_format = None
    text_call_format = None
    if tokenizer is not None:
        override = Path(model.chat_template) if model.chat_template else None
        template = ChatTemplate.load(model_dir, override)
        answer_format = find_format(
            template.source_for_tools if template else "", tokenizer, model.tool_format
        )
        has_template_without_tools = template is not None and not (
            template.takes_tools or template.takes_calls
        )
        if answer_format is None and has_template_without_tools:
            text_call_format = find_format("", tokenizer, TEXT_CALL_FORMAT)
    if answer_format is not None:
        log.info("answers are parsed as %s; --tool-format sets another format", answer_format.name)
    defaults = generation_defaults(model_dir) if model.generation_config == "auto" else {}
    decoding = SINGLE_TOKENS
    if spec.diffusion is not None:  # greedy is the only way to decode blocks
        decoding = Decoding(spec.diffusion.block)
        defaults = {"temperature": 0.0}
    elif defaults:
        log.info("sampling defaults from generation_config.json: %s", defaults)
    own_name = model.model if model_dir.name == "demo" else model_dir.name
    names = [name for name in (model.served_model_name or own_name).split(",") if name]
    if not names:
        raise ConfigError(f"served_model_name {model.served_model_name!r} has no name in it")
    name = names[0]
    signer = None
    if signs:
        server = config.server
        signer = ReceiptSigner(name, model_dir, server.receipt_key, server.request_log)
    return FrontEnd(
        link,
        model_name=name,
        aliases=names[1:],
        model_dir=model_dir,
        tokenizer=tokenizer,
        chat_template=template,
        answer_format=answer_format,
        text_call_format=text_call_format,
        defaults=defaults,
        max_queued=config.server.max_queued_requests if bounded else None,
        max_wait_s=config.server.max_queue_wait,
        processors=known_names(model.logits_processors),
        receipt_signer=signer,
        resume_window_s=config.server.resume_window,
        decoding=decoding,
    )
