"""Thirty streams at once in one asyncio program: python examples/stream_many.py"""

import asyncio
import time

from moeserve import AsyncEngine, SamplingParams


async def tell(engine: AsyncEngine, hero: str) -> tuple[str, int]:
    """Stream one story; return its text and the number of tokens."""
    text = ""
    tokens = 0
    messages = [{"role": "user", "content": f"Tell me a short story about a {hero}."}]
    async for piece in engine.chat(
        messages, SamplingParams(temperature=0.7, seed=1, max_tokens=120)
    ):
        text += piece.outputs[0].text
        tokens += len(piece.outputs[0].token_ids)
    return text, tokens


async def main() -> None:
    heroes = ["fox", "baker", "robot", "sailor", "cat", "gardener"] * 5
    async with AsyncEngine("demo") as engine:
        began = time.perf_counter()
        stories = await asyncio.gather(*(tell(engine, hero) for hero in heroes))
        seconds = time.perf_counter() - began
    tokens = sum(count for _, count in stories)
    print(
        f"{len(stories)} stories, {tokens} tokens, {tokens / seconds:.0f} tokens per second; "
        "the first one:"
    )
    print(stories[0][0])


if __name__ == "__main__":
    asyncio.run(main())
