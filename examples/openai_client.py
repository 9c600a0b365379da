"""Stream a chat with `openai`: python examples/openai_client.py [http://127.0.0.1:8000/v1]"""

import sys

from openai import OpenAI


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    with OpenAI(base_url=base_url, api_key="none") as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "What is expert parallelism?"}],
            temperature=0,
            max_tokens=150,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
