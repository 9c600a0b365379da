# /// script
# dependencies = ["litellm"]
# ///
"""LiteLLM, by each of its providers that fits."""

import json

import litellm
from checks import (
    BASE_URL,
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

FUNCTION = {"name": "get_weather", "description": "Returns the weather.", "parameters": WEATHER}
litellm.num_retries = 0


class Chats(Checks):
    client = "litellm"
    api = "openai"
    base = V1

    def ask(self, messages, **fields):
        fields = {"max_tokens": 60, "temperature": 0} | fields
        return litellm.completion(
            f"{self.api}/{MODEL}", messages, api_base=self.base, api_key=KEY, **fields
        )

    def first_chat(self):
        return self.ask([{"role": "user", "content": HELLO}]).choices[0].message.content

    def stream(self):
        stream = self.ask([{"role": "user", "content": HELLO}], stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in stream]

    def tool_round_trip(self):
        tools = [{"type": "function", "function": FUNCTION}]
        messages = [{"role": "user", "content": QUESTION}]
        message = self.ask(messages, tools=tools, tool_choice="required").choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return self.ask(messages, tools=tools).choices[0].message.content

    def second_turn(self):
        messages = [{"role": "system", "content": MANUAL}, {"role": "user", "content": HELLO}]
        messages.append(self.ask(messages).choices[0].message)
        yield
        self.ask([*messages, {"role": "user", "content": "And then?"}])

    def structured_output(self):
        answer = self.ask([{"role": "user", "content": HELLO}], response_format=Paint)
        return Paint.model_validate_json(answer.choices[0].message.content)

    def overflow(self):
        self.ask([{"role": "user", "content": TOO_LONG}])


class HostedVLLM(Chats):
    api = "hosted_vllm"


class LMStudio(Chats):
    api = "lm_studio"


class Anthropic(Chats):
    api = "anthropic"
    base = BASE_URL


class Ollama(Chats):
    api = "ollama_chat"
    base = BASE_URL


class Text(Checks):
    client = "litellm"
    api = "text-completion-openai"

    def ask(self, prompt, **fields):
        return litellm.text_completion(
            model=f"{self.api}/{MODEL}",
            prompt=prompt,
            api_base=V1,
            api_key=KEY,
            max_tokens=60,
            **fields,
        )

    def first_chat(self):
        return self.ask(HELLO).choices[0].text

    def stream(self):
        return [chunk.choices[0].text or "" for chunk in self.ask(HELLO, stream=True)]

    def overflow(self):
        self.ask(TOO_LONG)


class Responses(Checks):
    client = "litellm"
    api = "responses"

    def ask(self, items, **fields):
        return litellm.responses(
            items, f"openai/{MODEL}", api_base=V1, api_key=KEY, max_output_tokens=60, **fields
        )

    def first_chat(self):
        return self.ask(HELLO).output_text

    def stream(self):
        stream = self.ask(HELLO, stream=True)
        return [event.delta for event in stream if event.type == "response.output_text.delta"]

    def second_turn(self):
        first = self.ask(HELLO, instructions=MANUAL)
        yield
        self.ask("And then?", instructions=MANUAL, previous_response_id=first.id)

    def overflow(self):
        self.ask(TOO_LONG)


run(Chats, HostedVLLM, LMStudio, Anthropic, Ollama, Text, Responses)
