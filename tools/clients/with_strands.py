# /// script
# dependencies = ["strands-agents[openai]"]
# ///
"""Strands agents."""

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
from strands import Agent, tool
from strands.models.openai import OpenAIModel


class Chats(Checks):
    client = "strands-agents"
    api = "chat"
    model = OpenAIModel(
        client_args={"base_url": V1, "api_key": KEY, "max_retries": 0},
        model_id=MODEL,
        params={"max_tokens": 500, "temperature": 0},
    )

    def agent(self, **fields):
        return Agent(self.model, callback_handler=None, **fields)

    def first_chat(self):
        return str(self.agent()(HELLO))

    async def stream(self):
        events = self.agent().stream_async(HELLO)
        return [event["data"] async for event in events if "data" in event]

    def tool_round_trip(self):
        return str(self.agent(tools=[tool(get_weather)])(QUESTION))

    def second_turn(self):
        agent = self.agent(system_prompt=MANUAL)
        agent(HELLO)
        yield
        agent("And then?")

    def structured_output(self):
        return self.agent()(HELLO, structured_output_model=Paint).structured_output

    def overflow(self):
        self.agent()(TOO_LONG)


run(Chats)
