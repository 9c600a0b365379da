"""A front end on a link whose engine is played by the test."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moeserve.actor.actor import Inbox
from moeserve.cluster.link import EngineGone, FromEngine
from moeserve.errors import Overloaded
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import EngineIn, Ready, StepOutput
from moeserve.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "moeserve/assets/demo"


class ScriptedEngine:
    """Records what the front end sends; the test chooses the answers."""

    def __init__(self) -> None:
        self.outbox: Inbox[FromEngine] = Inbox("front end")
        self.sent: list[EngineIn] = []
        self.healthy = True
        self.room = 10**6  # messages before the engine counts as falling behind

    def send(self, msg: EngineIn) -> None:
        if self.room == 0:
            raise Overloaded("the engine does not read")
        self.room -= 1
        self.sent.append(msg)

    def take(self, kind: type) -> list[Any]:
        found = [m for m in self.sent if isinstance(m, kind)]
        self.sent = [m for m in self.sent if not isinstance(m, kind)]
        return found

    async def tell(self, *messages: FromEngine) -> None:
        """Send messages and let the front end process them."""
        for msg in messages:
            self.outbox.put(msg)
        for _ in range(5):
            await asyncio.sleep(0)

    async def rows(self, *rows: tuple[int, int, int], **extras: Any) -> None:
        """Send one step output; each row is (rid, token, finish)."""
        rids, tokens, finish = zip(*rows, strict=True)
        await self.tell(
            StepOutput(
                rids=array("q", rids).tobytes(),
                tokens=array("i", tokens).tobytes(),
                finish=bytes(finish),
                **extras,
            )
        )

    async def die(self, *, restarting: bool) -> None:
        await self.tell(
            EngineGone(exit_code=-9, cause="killed", restart_in_s=0.1 if restarting else None)
        )

    async def start(self) -> None: ...
    async def close(self, timeout_s: float) -> None: ...


def ready(**changes: Any) -> Ready:
    facts: dict[str, Any] = {
        "pid": 1,
        "architecture": "x",
        "dtype": "float32",
        "device": "cpu",
        "vocab_size": 2560,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "num_blocks": 100,
        "block_size": 16,
        "eos_token_ids": (2,),
        "num_params": 1,
        "num_active_params": 1,
        "weight_bytes": 1,
        "startup_s": 0.1,
    }
    return Ready(**(facts | changes))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def front(engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[FrontEnd]:
    """Yield a ready front end with room for two waiting sequences."""
    front = FrontEnd(
        engine,
        model_name="m",
        model_dir=DEMO,
        tokenizer=tokenizer,
        chat_template=None,
        defaults={},
        max_queued=2,
    )
    runs = front.runs = asyncio.create_task(front.run())  # type: ignore[attr-defined]
    await engine.tell(ready())
    yield front
    runs.cancel()
    await asyncio.gather(runs, return_exceptions=True)
