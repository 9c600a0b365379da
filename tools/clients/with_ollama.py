# /// script
# dependencies = ["ollama", "pydantic"]
# ///
"""Ollama's package."""

import ollama
from checks import (
    BASE_URL,
    HELLO,
    MANUAL,
    MODEL,
    QUESTION,
    TOO_LONG,
    Checks,
    Paint,
    get_weather,
    run,
)

CLIENT = ollama.Client(BASE_URL)
BRIEF = {"num_predict": 60, "temperature": 0}


class Chats(Checks):
    client = "ollama"
    api = "api/chat"

    def ask(self, messages, **fields):
        return CLIENT.chat(MODEL, messages, options=BRIEF, **fields)

    def first_chat(self):
        assert MODEL in [model.model for model in CLIENT.list().models]
        assert CLIENT.show(MODEL).modelinfo
        return self.ask([{"role": "user", "content": HELLO}]).message.content

    def stream(self):
        stream = self.ask([{"role": "user", "content": HELLO}], stream=True)
        return [part.message.content for part in stream]

    def tool_round_trip(self):
        messages = [{"role": "user", "content": QUESTION}]
        message = self.ask(messages, tools=[get_weather]).message
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
        return self.ask(messages, tools=[get_weather]).message.content

    def second_turn(self):
        messages = [{"role": "system", "content": MANUAL}, {"role": "user", "content": HELLO}]
        messages.append(self.ask(messages).message)
        yield
        self.ask([*messages, {"role": "user", "content": "And then?"}])

    def structured_output(self):
        answer = self.ask([{"role": "user", "content": HELLO}], format=Paint.model_json_schema())
        return Paint.model_validate_json(answer.message.content)

    def overflow(self):
        self.ask([{"role": "user", "content": TOO_LONG}])


class Generate(Checks):
    client = "ollama"
    api = "api/generate"

    def first_chat(self):
        return CLIENT.generate(MODEL, HELLO, options=BRIEF).response

    def stream(self):
        return [part.response for part in CLIENT.generate(MODEL, HELLO, options=BRIEF, stream=True)]

    def overflow(self):
        CLIENT.generate(MODEL, TOO_LONG, options=BRIEF)


run(Chats, Generate)
