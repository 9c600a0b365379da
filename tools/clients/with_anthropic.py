# /// script
# dependencies = ["anthropic", "pydantic"]
# ///
"""Anthropic's package for Python."""

import anthropic
from checks import (
    BASE_URL,
    HELLO,
    KEY,
    MANUAL,
    MODEL,
    QUESTION,
    TOO_LONG,
    WEATHER,
    Checks,
    Paint,
    get_weather,
    run,
)

CLIENT = anthropic.Anthropic(base_url=BASE_URL, api_key=KEY, max_retries=0)
TOOL = {"name": "get_weather", "description": "Returns the weather.", "input_schema": WEATHER}


class Messages(Checks):
    client = "anthropic"
    api = "messages"

    def ask(self, messages, **fields):
        return CLIENT.messages.create(
            model=MODEL, messages=messages, **({"max_tokens": 60} | fields)
        )

    def first_chat(self):
        messages = [{"role": "user", "content": HELLO}]
        counted = CLIENT.messages.count_tokens(model=MODEL, messages=messages).input_tokens
        answer = self.ask(messages)
        usage = answer.usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
        return answer.content[0].text

    def stream(self):
        with CLIENT.messages.stream(
            model=MODEL, messages=[{"role": "user", "content": HELLO}], max_tokens=60
        ) as stream:
            return list(stream.text_stream)

    def tool_round_trip(self):
        messages = [{"role": "user", "content": QUESTION}]
        answer = self.ask(
            messages, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": get_weather(**block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results},
        ]
        return self.ask(messages, tools=[TOOL], tool_choice={"type": "none"}).content[0].text

    def second_turn(self):
        messages = [{"role": "user", "content": HELLO}]
        answer = self.ask(messages, system=MANUAL)
        yield
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": "And then?"},
        ]
        self.ask(messages, system=MANUAL)

    def structured_output(self):
        answer = CLIENT.messages.parse(
            model=MODEL,
            messages=[{"role": "user", "content": HELLO}],
            max_tokens=60,
            output_format=Paint,
        )
        return answer.parsed_output

    def overflow(self):
        self.ask([{"role": "user", "content": TOO_LONG}])


run(Messages)
