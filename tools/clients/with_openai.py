# /// script
# dependencies = ["openai", "pydantic"]
# ///
"""OpenAI's package for Python: chats, responses, completions."""

import json

import openai
from checks import (
    HELLO,
    KEY,
    MANUAL,
    MODEL,
    QUESTION,
    TOO_LONG,
    V1,
    WEATHER,
    Checks,
    Paint,
    get_weather,
    run,
)

CLIENT = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
FUNCTION = {"name": "get_weather", "description": "Returns the weather.", "parameters": WEATHER}


class Chats(Checks):
    client = "openai"
    api = "chat"

    def ask(self, messages, **fields):
        return CLIENT.chat.completions.create(
            model=MODEL, messages=messages, **({"max_tokens": 60} | fields)
        )

    def first_chat(self):
        return self.ask([{"role": "user", "content": HELLO}]).choices[0].message.content

    def stream(self):
        with CLIENT.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": HELLO}], max_tokens=60
        ) as stream:
            return [event.delta for event in stream if event.type == "content.delta"]

    def tool_round_trip(self):
        tools = [{"type": "function", "function": FUNCTION}]
        messages = [{"role": "user", "content": QUESTION}]
        message = self.ask(messages, tools=tools, tool_choice="required").choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return self.ask(messages, tools=tools, tool_choice="none").choices[0].message.content

    def second_turn(self):
        messages = [{"role": "system", "content": MANUAL}, {"role": "user", "content": HELLO}]
        messages.append(self.ask(messages).choices[0].message)
        yield
        self.ask([*messages, {"role": "user", "content": "And then?"}])

    def structured_output(self):
        answer = CLIENT.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": HELLO}], response_format=Paint
        )
        return answer.choices[0].message.parsed

    def overflow(self):
        self.ask([{"role": "user", "content": TOO_LONG}])


class Responses(Checks):
    client = "openai"
    api = "responses"

    def ask(self, items, **fields):
        return CLIENT.responses.create(
            model=MODEL, input=items, **({"max_output_tokens": 60} | fields)
        )

    def first_chat(self):
        return self.ask(HELLO).output_text

    def stream(self):
        with CLIENT.responses.stream(model=MODEL, input=HELLO, max_output_tokens=60) as stream:
            return [event.delta for event in stream if event.type == "response.output_text.delta"]

    def tool_round_trip(self):
        tools = [{"type": "function", "strict": True} | FUNCTION]
        answer = self.ask(QUESTION, tools=tools, tool_choice="required")
        results = []
        for call in answer.output:
            if call.type == "function_call":
                output = get_weather(**json.loads(call.arguments))
                results.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": output}
                )
        return self.ask(
            results, tools=tools, tool_choice="none", previous_response_id=answer.id
        ).output_text

    def second_turn(self):
        first = self.ask(HELLO, instructions=MANUAL)
        yield
        self.ask("And then?", instructions=MANUAL, previous_response_id=first.id)

    def structured_output(self):
        answer = CLIENT.responses.parse(model=MODEL, input=HELLO, text_format=Paint)
        return answer.output_parsed

    def overflow(self):
        self.ask(TOO_LONG)


class Completions(Checks):
    client = "openai"
    api = "completions"

    def first_chat(self):
        return CLIENT.completions.create(model=MODEL, prompt=HELLO).choices[0].text

    def stream(self):
        stream = CLIENT.completions.create(model=MODEL, prompt=HELLO, stream=True)
        return [chunk.choices[0].text for chunk in stream]

    def overflow(self):
        CLIENT.completions.create(model=MODEL, prompt=TOO_LONG)


if __name__ == "__main__":
    run(Chats, Responses, Completions)
