# /// script
# dependencies = ["smolagents[openai]"]
# ///
"""Hugging Face's smolagents."""

from checks import (
    HELLO,
    KEY,
    MANUAL,
    MODEL,
    QUESTION,
    TOO_LONG,
    V1,
    Checks,
    Paint,
    get_weather,
    run,
)
from smolagents import ChatMessage, OpenAIModel, tool


class Chats(Checks):
    client = "smolagents"
    api = "chat"
    model = OpenAIModel(MODEL, api_base=V1, api_key=KEY, max_tokens=60, temperature=0)

    def first_chat(self):
        return self.model([ChatMessage("user", HELLO)]).content

    def stream(self):
        stream = self.model.generate_stream([ChatMessage("user", HELLO)])
        return [delta.content for delta in stream if delta.content]

    def tool_round_trip(self):
        weather = tool(get_weather)
        messages = [ChatMessage("user", QUESTION)]
        message = self.model(messages, tools_to_call_from=[weather])
        messages.append(message)
        for call in message.tool_calls:
            call = self.model.parse_tool_calls(message).tool_calls[0]
            messages.append(
                ChatMessage("user", "Observation:\n" + weather(**call.function.arguments))
            )
        return self.model(messages).content

    def second_turn(self):
        messages = [ChatMessage("system", MANUAL), ChatMessage("user", HELLO)]
        messages.append(self.model(messages))
        yield
        self.model([*messages, ChatMessage("user", "And then?")])

    def structured_output(self):
        schema = {"name": "paint", "strict": True, "schema": Paint.model_json_schema()}
        answer = self.model(
            [ChatMessage("user", HELLO)],
            response_format={"type": "json_schema", "json_schema": schema},
        )
        return Paint.model_validate_json(answer.content)

    def overflow(self):
        self.model([ChatMessage("user", TOO_LONG)])


run(Chats)
