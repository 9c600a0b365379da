"""A request's tokens depend on nothing but itself: alone, in a crowd, cached, they are the same,
logprobs to the bit.

python examples/same_tokens.py
"""

from moeserve import LLM, SamplingParams


def main() -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=80, logprobs=0)
    prompt = "Once upon a time, there was a"
    with LLM("demo") as llm:
        alone = llm.generate(prompt, params)[0].outputs[0]
        crowd = [f"{i} little boats sailed out to" for i in range(31)]
        among = llm.generate([*crowd, prompt], params)[-1].outputs[0]
    assert among.token_ids == alone.token_ids
    assert among.cumulative_logprob == alone.cumulative_logprob
    print(
        f"{len(alone.token_ids)} tokens, the same alone and among {len(crowd)} others:\n"
        f"{prompt}{alone.text}"
    )


if __name__ == "__main__":
    main()
