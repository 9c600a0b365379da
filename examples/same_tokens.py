"""A request gets the same tokens, and logprobs with the same bits, alone and in a batch of 32.

python examples/same_tokens.py
"""

from moeserve import LLM, SamplingParams


def main() -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=80, logprobs=0)
    prompt = "Once upon a time, there was a"
    with LLM("demo") as llm:
        alone = llm.generate(prompt, params)[0].outputs[0]
        others = [f"{i} little boats sailed out to" for i in range(31)]
        batched = llm.generate([*others, prompt], params)[-1].outputs[0]
    assert batched.token_ids == alone.token_ids
    assert batched.cumulative_logprob == alone.cumulative_logprob
    print(
        f"{len(alone.token_ids)} tokens, the same alone and with {len(others)} others:\n"
        f"{prompt}{alone.text}"
    )


if __name__ == "__main__":
    main()
