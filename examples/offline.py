"""A batch of prompts through `LLM`, no server: python examples/offline.py [MODEL]"""

import sys

from moeserve import LLM, SamplingParams


def main() -> None:
    questions = [
        "What is moeserve?",
        "Tell me a story about a fox and a lantern.",
        "What is a router?",
    ]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        conversations = [[{"role": "user", "content": q}] for q in questions]
        for question, answer in zip(
            questions,
            llm.chat(conversations, SamplingParams(temperature=0, max_tokens=200)),
            strict=True,
        ):
            print(f"> {question}\n{answer.outputs[0].text}\n")


if __name__ == "__main__":
    main()
