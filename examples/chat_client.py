"""Stream a chat with `AsyncClient`: python examples/chat_client.py [http://127.0.0.1:8000/v1]"""

import asyncio
import sys

from moeserve import AsyncClient


async def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    async with AsyncClient(base_url=base_url) as client:
        models = await client.models.list()
        stream = await client.chat.completions.create(
            model=models.data[0].id,
            messages=[{"role": "user", "content": "Tell me a story about a baker and a river."}],
            temperature=0,
            max_tokens=150,
            stream=True,
        )
        async with stream:
            async for chunk in stream:
                if chunk.choices:
                    print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    asyncio.run(main())
